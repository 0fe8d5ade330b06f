"""FP8 speeds up the products of its own layers, by the ratio of the device's peaks."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from megavlm.arch.dims import Dims
from megavlm.arch.kinds import local_parameters
from megavlm.arch.scenario import scenario_of
from megavlm.config.schema import PrecisionConfig
from megavlm.planner.cost import features_of, layer_seconds
from megavlm.planner.hardware import PROFILES, fp8_speed
from megavlm.planner.layer_profiles import layer_profiles
from megavlm.planner.memory import model_state_bytes
from megavlm.planner.terms import FP8, rank_flops, work_terms
from tests.support.flags import resolved

# As wide as a 7B: where products are narrower, casting costs more than FP8 saves.
WIDE = (
    "--precision bf16 --set model.language.hidden_size=4096 model.language.ffn_hidden_size=11008 "
    "model.language.num_attention_heads=32 --seq-length 4096 --set model.language.vocab_size=256"
)
FIRST_LAST = f"{WIDE} --fp8 hybrid --first-last-layers-bf16"
ONE, H100 = Dims(), PROFILES["h100"]


def test_only_products_of_fp8_layers_are_faster_and_their_inputs_are_cast() -> None:
    high = scenario_of(resolved(WIDE.split()), ONE, on_gpu=True)
    low = scenario_of(resolved(FIRST_LAST.split()), ONE, on_gpu=True)
    assert low.fp8 == {"language.layers.1", "language.layers.2"}
    for name in low.names:
        before, after = layer_seconds(name, high, H100).forward, layer_seconds(name, low, H100).forward
        products = features_of(name, low)[0] / H100.forward.matmul
        saved = products * (1 - 1 / (fp8_speed(H100) * FP8["tensorwise"].share)) if name in low.fp8 else 0.0
        # Read twice in bf16, written twice in FP8: inputs of QKV, of the output projection, and of the MLP's products.
        cast = 6 * 4096 * (3 * 4096 + 11008) / H100.forward.bandwidth if name in low.fp8 else 0.0
        assert before - after == pytest.approx(saved - cast, rel=1e-6, abs=1e-12), name
    # Layers are measured by kind: kept ones are another kind.
    forward = layer_profiles(low, H100).forward
    times = dict(zip(low.names, forward[1:] - forward[:-1], strict=True))
    assert times["language.layers.0"] > times["language.layers.1"]
    assert forward[-1] == pytest.approx(sum(layer_seconds(name, low, H100).forward for name in low.names))


def test_every_recipe_of_the_option_has_its_terms() -> None:
    assert FP8.keys() == set(get_args(get_type_hints(PrecisionConfig)["fp8_recipe"]))
    wide = [*WIDE.split(), "--fp8", "hybrid", "--fp8-recipe"]
    seconds = {
        recipe: layer_seconds("language.layers.1", scenario_of(resolved([*wide, recipe]), ONE, on_gpu=True), H100)
        for recipe in ("delayed", "tensorwise", "blockwise")
    }
    took = [seconds[recipe].forward + seconds[recipe].backward for recipe in ("delayed", "tensorwise", "blockwise")]
    assert took == sorted(took)  # 0.319, 0.331 and 0.355 s for a step of LLaVA on an H200


def test_attention_pays_for_the_width_that_its_kernel_has_and_for_scores_that_it_computes_again() -> None:
    """Heads of 80 channels, Qwen2.5-VL's, take a kernel for 128: 249 TFLOP/s were measured, forward and backward."""
    vision = "model.vision.hidden_size=1280 model.vision.num_attention_heads=16 model.vision.ffn_hidden_size=3420"
    config = resolved(["--precision", "bf16", "--set", *vision.split()])
    on_cpu, on_gpu = (scenario_of(config, ONE, on_gpu=gpu) for gpu in (False, True))
    name = "vision.layers.0"
    assert rank_flops(name, on_gpu)[1] / rank_flops(name, on_cpu)[1] == 128 / 80
    ahead, back = work_terms(name, on_gpu, H100)["attention"]
    assert back * H100.backward.attention == pytest.approx(2.5 * ahead * H100.forward.attention)


def test_devices_without_fp8_units_gain_nothing() -> None:
    assert fp8_speed(PROFILES["a100"]) == fp8_speed(PROFILES["cpu"]) == 1
    assert fp8_speed(PROFILES["h200"]) == pytest.approx(2, rel=1e-3)


def test_weights_are_held_again_in_fp8_unless_they_are_in_fp8_alone() -> None:
    for sharding in ("optimizer", "full"):
        argv = [*FIRST_LAST.split(), "--data-parallel-sharding", sharding]
        on_cpu, on_gpu = (scenario_of(resolved([*argv]), ONE, on_gpu=gpu) for gpu in (False, True))
        for name in on_gpu.names:
            more = 2 * local_parameters(name, on_gpu.model, 1) if name in on_gpu.fp8 else 0
            assert model_state_bytes(name, on_gpu).weights - model_state_bytes(name, on_cpu).weights == more, name
    alone = scenario_of(resolved([*FIRST_LAST.split(), "--fp8-param-gather"]), ONE, on_gpu=True)
    assert alone.kept_in_fp8 == alone.fp8
    assert all(
        model_state_bytes(name, alone) == model_state_bytes(name, replace(alone, on_gpu=False)) for name in alone.names
    )
