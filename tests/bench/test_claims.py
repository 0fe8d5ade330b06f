"""docs/reports/predictions.md shows what the planner predicts today of others' claims."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_documented_claims_are_predicted_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import claims  # type: ignore[import-not-found]

    text = claims.DOCUMENT.read_text(encoding="utf-8")
    assert "| claim | claimed | predicted |" in text
    assert claims.documented(text) == text, "renew it: python benchmarks/claims.py --write"
