"""The model of one GPU's step: what is launched when, each table of passes, and the search that finds the same."""

from __future__ import annotations

from dataclasses import replace

import predict_gpu
import pytest
from explain import BEFORE, Explained, StepPart, played

from megavlm.arch.dims import Dims
from megavlm.arch.scenario import Scenario, scenario_of
from megavlm.config.schema import Config, PrecisionConfig, TrainConfig
from megavlm.families import published_model
from megavlm.planner.candidates import Space
from megavlm.planner.hardware import profile
from megavlm.planner.layer_profiles import layer_profiles
from megavlm.planner.search import search
from megavlm.planner.step_time import step_of
from megavlm.planner.terms import HostTime, memory_traffic

H100 = profile("h100")


def case(model: str = "llava", **precision: object) -> Scenario:
    sizes = published_model("llava_1_5_7b") if model == "llava" else published_model("qwen2_5_vl_7b")
    config = Config(
        model=sizes,
        precision=PrecisionConfig("bf16", **precision),  # type: ignore[arg-type]
        train=TrainConfig(seq_length=4096, micro_batch_size=1, global_batch_size=1),
    )
    return scenario_of(config, Dims(), on_gpu=True)


def step(device: tuple[float, float], host: tuple[float, float], *, waits: bool = False) -> Explained:
    """Three layers that see, whose host is slow, then two of language, whose device is."""
    seeing = [StepPart(f"vision.layers.{i}", {"products": (1.0, 2.0)}, host) for i in range(3)]
    language = [StepPart(f"language.layers.{i}", {"products": device}, (1.0, 1.0)) for i in range(2)]
    return played([*seeing, *language], 0.0, H100, HostTime(waits=waits))


def test_the_device_waits_in_the_forward_pass_and_the_host_is_ahead_in_the_backward_pass() -> None:
    found = step((10.0, 20.0), (4.0, 4.0))
    # Forward: vision ends at 3·4 + 1; language 20 later. Backward: 40, when the host has been ahead for long, then 6.
    assert found.seconds == pytest.approx(13 + 20 + 40 + 6)
    assert found.waiting() == pytest.approx(13 - 3)
    assert found.language == pytest.approx(20 + 40)
    slow = step((1.0, 1.0), (4.0, 4.0))  # language is no longer than its launches: the host is never ahead
    assert slow.seconds == pytest.approx(12 + 2 + 2 + 12 + 2)
    # A host that asks the device after each layer comes to the next one later: 3·(4 + 1), and 1 until language begins.
    assert step((10.0, 20.0), (4.0, 4.0), waits=True).seconds == pytest.approx(16 + 20 + 40 + 6)


def test_passes_of_a_language_layer_are_the_textbooks() -> None:
    """LLaVA: 4096 wide, MLP 11008, 4,096 tokens of two bytes."""
    one = 4096 * 2
    found = memory_traffic("language.layers.0", case(), BEFORE)
    assert found["norms"] == (4 * 4096 * one, 6 * 4096 * one)
    assert found["rotation"] == (5 * 8192 * one, 5 * 8192 * one)
    assert found["activation"] == (5 * 11008 * one, 13 * 11008 * one)
    matrices = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert found["weight gradients"] == (0, 10 * matrices)
    assert "biases" not in found
    left = memory_traffic("language.layers.0", replace(case(), own=frozenset()), BEFORE)
    assert sum(pair[1] for pair in left.values()) == sum(pair[1] for pair in found.values()) - 10 * matrices


def test_the_search_predicts_the_same_step() -> None:
    """What `megavlm plan` prints for both benchmarked shapes: there all images have the size of the mean one, and all
    tokens are trained.
    """
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
