"""The table of docs/planner.md is what the simulation says today."""

from pathlib import Path

from benchmarks.placement_paper import table

DOCUMENT = Path(__file__).parents[3] / "docs" / "planner.md"


def test_the_documented_table_is_the_simulated_one() -> None:
    assert "\n".join(table(32)) in DOCUMENT.read_text()
