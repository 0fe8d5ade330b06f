"""The table of predicted placements is what the simulation says today, but for small corrections of the models."""

import re
from pathlib import Path

import pytest

from benchmarks.placement_paper import table

DOCUMENT = Path(__file__).parents[3] / "docs" / "reports" / "predictions.md"
GAIN = re.compile(r"\d\.\d\d")


def test_the_documented_table_is_the_simulated_one() -> None:
    documented = DOCUMENT.read_text().splitlines()
    header, _, *rows = table(32)
    start = documented.index(header) + 2
    for ours, theirs in zip(rows, documented[start:], strict=False):
        assert GAIN.sub("", ours) == GAIN.sub("", theirs)
        assert [float(gain) for gain in GAIN.findall(theirs)] == pytest.approx(
            [float(gain) for gain in GAIN.findall(ours)], abs=0.02
        )
