"""docs/performance-model.md shows what the model of a GPU predicts today."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_documented_predictions_are_todays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import predict_gpu  # type: ignore[import-not-found]

    text = predict_gpu.DOCUMENT.read_text(encoding="utf-8")
    assert "| LLaVA-1.5-7B, H100, ms |" in text
    assert predict_gpu.documented(text) == text, "renew it: python benchmarks/predict_gpu.py --write"
