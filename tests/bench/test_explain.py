"""The model of one GPU's step: what is launched when, and what each table of passes says of a layer."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megavlm.arch.dims import Dims
from megavlm.arch.scenario import Scenario, scenario_of
from megavlm.config.schema import Config, PrecisionConfig, TrainConfig
from megavlm.families import published_model
from megavlm.planner.hardware import profile
from megavlm.planner.terms import HostTime, memory_traffic

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from explain import BEFORE, Explained, StepPart, played

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
