"""Terms of a layer on a GPU: what tensor parallelism divides, what frozen layers leave out, when launching shows, and
what FP8 changes of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest

from megavlm.arch.dims import Dims
from megavlm.arch.kinds import local_parameters
from megavlm.arch.scenario import Scenario, scenario_of
from megavlm.arch.schedules import shape_of
from megavlm.command_line.parsing import parse
from megavlm.config.schema import PrecisionConfig
from megavlm.families import published_model
from megavlm.planner.cost import features_of, layer_seconds
from megavlm.planner.hardware import PROFILES, fp8_speed, profile
from megavlm.planner.layer_profiles import layer_profiles, relays
from megavlm.planner.memory import model_state_bytes
from megavlm.planner.terms import (
    FP8,
    NOW,
    TE_HOST,
    TORCH,
    launch_seconds,
    layer_terms,
    memory_traffic,
    program_of,
    rank_flops,
    work_terms,
)
from tests.support.flags import resolved

H100 = profile("h100")
LANGUAGE, VISION = "language.layers.0", "vision.layers.0"
INSIDE = {"rotation", "activation", "copies of values", "norms of queries and keys"}
BETWEEN = {"norms", "residuals", "layer scale"}


def case(name: str = "qwen3_vl_8b", flags: str = "", *, tp: int = 1, dp: int = 1) -> Scenario:
    argv = (
        f"--precision bf16 --seq-length 4096 --global-batch-size {8 * dp} --set model.language.vocab_size=256 {flags}"
    ).split()
    config = parse(argv)
    return scenario_of(replace(config, model=published_model(name)), Dims(tp=tp, pp=1, vpp=1, dp=dp), on_gpu=True)


def without_padding(scenario: Scenario) -> Scenario:
    """Make the tower's MLP so wide that one and two ranks hold it without padding."""
    vision = replace(scenario.model.vision, ffn_hidden_size=4096)
    return replace(scenario, model=replace(scenario.model, vision=vision))


@pytest.mark.parametrize("name", ["qwen3_vl_8b", "internvl3_8b", "llava_1_5_7b", "qwen2_5_vl_7b"])
def test_tensor_parallelism_divides_what_lies_inside_blocks_and_sequences_the_rest(name: str) -> None:
    whole = without_padding(case(name))
    for layer in (LANGUAGE, VISION):
        alone = memory_traffic(layer, whole, NOW)
        assert {"norms", "residuals", "activation"} <= set(alone) <= INSIDE | BETWEEN
        for sequences in (True, False):
            two = without_padding(case(name, tp=2))
            half = memory_traffic(layer, replace(two, sequence_parallel=sequences), NOW)
            for term, (forward, backward) in alone.items():
                share = 2 if sequences or term in INSIDE else 1
                assert half[term] == pytest.approx((forward / share, backward / share)), (layer, term)


def test_frozen_layers_have_no_weight_gradients_and_without_gradients_no_backward_pass() -> None:
    trained, torch = case(), case(flags="--transformer-impl torch")
    assert program_of(torch) is TORCH
    added = memory_traffic(LANGUAGE, torch, TORCH)["weight gradients"]
    assert added[0] == 0 < added[1]
    reached = replace(torch, own=torch.own - {LANGUAGE})
    assert "weight gradients" not in memory_traffic(LANGUAGE, reached, TORCH)
    assert layer_seconds(LANGUAGE, reached, H100).backward < layer_seconds(LANGUAGE, torch, H100).backward
    frozen = replace(trained, own=frozenset(), trained=frozenset())
    for name in frozen.names:
        found = layer_seconds(name, frozen, H100)
        assert found.backward == found.launch[1] == 0, name
        if name == "output":  # which computes its input's gradient beside the loss
            assert found.forward < layer_seconds(name, trained, H100).forward
        else:
            assert found.forward == layer_seconds(name, trained, H100).forward, name
        assert not any(pair[1] for pair in layer_terms(name, frozen, H100, NOW).values()), name


def test_passes_of_host_and_device_are_those_that_an_event_loop_plays() -> None:
    random = np.random.default_rng(0)
    for _ in range(5):
        device, host = random.uniform(0, 1, (2, 9)) * random.choice([0.3, 1, 3], 2)[:, None]
        prefix = [np.concatenate([[0.0], np.cumsum(values)]) for values in (device, host)]
        forward, backward = relays(prefix[1], prefix[0]), relays(prefix[0], prefix[1])
        for i in range(9):
            for j in range(i + 1, 10):
                assert forward[i, j] == pytest.approx(played(device[i:j], host[i:j]))
                assert backward[i, j] == pytest.approx(played(device[i:j][::-1], host[i:j][::-1]))


def played(device: np.ndarray, host: np.ndarray) -> float:
    issued = ended = 0.0
    for runs, launches in zip(device, host, strict=True):
        issued += launches
        ended = max(ended, issued) + runs
    return ended


def test_a_single_stage_waits_for_its_host_once_a_step_and_stages_in_each_pass() -> None:
    """LLaVA's vision layers launch slower than they run; its language layers, which follow, take far longer."""
    profiles = layer_profiles(case("llava_1_5_7b"), H100)
    count = profiles.count
    device = float(profiles.forward[-1])
    alone = profiles.durations([(0, count)], (), shape=shape_of(profiles.scenario.dims, 3))
    assert alone.forward[0][0] > 1.05 * device
    assert alone.forward[0][1:] == pytest.approx([device] * 2)
    shape = replace(shape_of(profiles.scenario.dims, 3), pp=2)
    stages = profiles.durations([(0, 26), (26, count)], (0.0,), shape=shape)
    vision = sum(launch_seconds(n, profiles.scenario, NOW, TE_HOST)[0] for n in profiles.scenario.names[:26])
    assert stages.forward[0] == pytest.approx([vision] * 3, rel=0.02)
    ran = sum(
        sum(p[0] for p in layer_terms(n, profiles.scenario, H100, NOW).values()) for n in profiles.scenario.names[:26]
    )
    assert ran < 0.7 * vision


def test_heads_and_widths_that_tp_does_not_divide_take_what_their_padding_takes() -> None:
    """Qwen2.5-VL-7B at TP 8: 32 heads where 28 are, and 3,456 channels of the tower's MLP where 3,420 are."""
    given = case("qwen2_5_vl_7b", tp=8)
    language, vision = given.model.language, given.model.vision
    sizes = {"language": replace(language, num_attention_heads=32), "vision": replace(vision, ffn_hidden_size=8 * 432)}
    padded = replace(given, model=replace(given.model, **sizes))
    for layer in (LANGUAGE, VISION):
        assert rank_flops(layer, given) == pytest.approx(rank_flops(layer, padded), rel=1e-12)
        assert local_parameters(layer, given.model, 8) == local_parameters(layer, padded.model, 8)
    divided = case("qwen2_5_vl_7b", tp=4)
    whole = case("qwen2_5_vl_7b")
    assert rank_flops(LANGUAGE, divided) == tuple(flops / 4 for flops in rank_flops(LANGUAGE, whole))


# As wide as a 7B: where products are narrower, casting costs more than FP8 saves.
WIDE = (
    "--precision bf16 --set model.language.hidden_size=4096 model.language.ffn_hidden_size=11008 "
    "model.language.num_attention_heads=32 --seq-length 4096 --set model.language.vocab_size=256"
)
FIRST_LAST = f"{WIDE} --fp8 hybrid --first-last-layers-bf16"
ONE = Dims()


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
