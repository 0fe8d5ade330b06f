"""The benchmark of the planner predicts each of its configurations."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import planner


def test_every_configuration_has_a_prediction():
    seconds = {name: planner.predicted(flags, "h100") for name, flags in planner.CASES.items()}
    assert all(value > 0 for value in seconds.values())
    assert seconds["dp2 full"] > seconds["dp2"] > seconds["dp2 frozen vision"]
