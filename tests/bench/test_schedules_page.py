"""docs/reports/predictions.md shows the records of `benchmarks/schedules.py`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_page_has_the_table_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    schedules = importlib.import_module("schedules")
    page = schedules.PAGE.read_text(encoding="utf-8")
    assert schedules.with_table(page) == page
    assert page.count("| PP4 m=16 frozen tower |") == 2
