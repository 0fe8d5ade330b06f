"""The page on the model of a GPU shows what it predicts today, and the planner's search finds the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megavlm.planner.candidates import Space
from megavlm.planner.hardware import profile
from megavlm.planner.layer_profiles import layer_profiles
from megavlm.planner.search import search
from megavlm.planner.step_time import step_of

ROOT = Path(__file__).parents[2]


def test_the_documented_predictions_are_todays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import predict_gpu  # type: ignore[import-not-found]

    text = predict_gpu.DOCUMENT.read_text(encoding="utf-8")
    assert "| LLaVA-1.5-7B, H100, ms |" in text
    assert predict_gpu.documented(text) == text, "renew it: python benchmarks/predict_gpu.py --write"


def test_the_search_predicts_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `tools/plan.py` prints for both benchmarked shapes: there all images have the size of the mean one, and all
    tokens are trained.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import predict_gpu

    space = Space((1,), (1,), (1,), recompute=("none",), placement=("stages",), offload=())
    for found in predict_gpu.predictions():
        shape, hardware = found.shape, profile(found.gpu)
        config, count = predict_gpu.gpu_model.run_config(shape, precision="bf16"), len(shape.images)
        factor = shape.model.vision.patch_size * shape.model.projector.pixel_shuffle
        mean = (sum(height * width for height, width in shape.images) / count) ** 0.5
        side = round(mean / factor) * factor
        config = replace(
            config,
            train=replace(config.train, seq_length=shape.sample, micro_batch_size=count, global_batch_size=count),
            data=replace(config.data, kind="synthetic", images_per_sample=(1,), image_sizes=(side,)),
        )
        best = search(config, 1, hardware, space=replace(space, micro_batch=(count,))).best[0].step
        case = predict_gpu.case(shape)
        everything = replace(case, work=replace(case.work, trained_tokens=case.work.tokens))
        predicted = predict_gpu.explained(everything, hardware, predict_gpu.NOW, predict_gpu.OURS).seconds
        assert best.seconds == pytest.approx(predicted, rel=0.001 if "LLaVA" in shape.name else 0.03), shape.name
        # With the same images the two are one.
        tables, seconds = layer_profiles(case, hardware), found.steps["now"].seconds
        assert step_of(tables, hardware, ()).seconds == pytest.approx(seconds, rel=0.001), shape.name
