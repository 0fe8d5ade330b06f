"""ZeRO's stages in the planner: bytes, collectives, and which the search takes when memory is short."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from megavlm.arch.dims import Dims
from megavlm.arch.scenario import Scenario, Sharding, encoder_scenario, scenario_of
from megavlm.optim.codes import Coded
from megavlm.planner.candidates import Space
from megavlm.planner.cost import coded_bytes, gradient_seconds, optimizer_seconds
from megavlm.planner.hardware import PROFILES
from megavlm.planner.memory import model_state_bytes
from megavlm.planner.search import search
from tests.support.small_run import SMALL

KINDS: tuple[Sharding, ...] = get_args(Sharding)
LAYER = "language.layers.0"


def case(kind: Sharding, *, dp: int = 8, size: int | None = None) -> Scenario:
    config = replace(SMALL, parallel=replace(SMALL.parallel, data_parallel_sharding=kind, hybrid_shard_size=size))
    return scenario_of(config, Dims(1, 1, 1, dp), on_gpu=True)


def test_bytes_of_a_parameter() -> None:
    """2 + 4 + 12; the last divided; the last two divided and weights gathered; nothing but rows."""
    count = model_state_bytes(LAYER, case("none")).total / 18
    found = {kind: model_state_bytes(LAYER, case(kind)).total / count for kind in KINDS}
    expected = {"none": 18, "optimizer": 6 + 12 / 8, "optimizer_gradients": 2 + 16 / 8, "full": 16 / 8}
    assert found == pytest.approx(expected)
    assert model_state_bytes(LAYER, case("full", size=2)).total / count == pytest.approx(16 / 2)
    assert encoder_scenario(case("full", size=2), 1).shards == 8, "a colocated encoder is shared by all"


def test_more_micro_batches_cost_more_collectives_from_stage_2_on() -> None:
    hardware, count = PROFILES["h100"], 1e9
    for kind in KINDS:
        cases = (replace(case(kind), micro_batches=number) for number in (1, 8))
        few, many = (gradient_seconds(count, each, hardware, held=count) for each in cases)
        assert few > 0
        assert (many > few) == (kind in ("optimizer_gradients", "full"))
        assert gradient_seconds(count, case(kind, dp=1), hardware, held=count) == 0
    stages = [optimizer_seconds(count, case(kind), hardware) for kind in KINDS]
    assert stages == sorted(stages, reverse=True)


def test_gradients_in_bf16_take_half_the_bytes_and_time_of_links() -> None:
    hardware, count = PROFILES["h100"], 1e9
    for kind in KINDS:
        half, exact = (replace(case(kind), micro_batches=1, gradient_bytes=size) for size in (2, 4))
        seconds = [gradient_seconds(count, each, hardware, held=count) for each in (half, exact)]
        assert seconds[0] < seconds[1]
    sizes = [model_state_bytes(LAYER, replace(case("optimizer"), gradient_bytes=size)).gradients for size in (2, 4)]
    assert sizes[0] == sizes[1] / 2


def test_replicas_add_an_all_reduce_of_their_rows() -> None:
    """Over a network that is slower than the links of a node, sums of rows cost less than rows from everywhere."""
    base, count = PROFILES["h100"], 1e9
    hardware = replace(base, far=replace(base.far, bandwidth=base.far.bandwidth / 4))
    inside, across = case("optimizer", dp=16), case("optimizer", dp=16, size=8)
    one_node = gradient_seconds(count, case("optimizer", dp=8), hardware)
    assert one_node < gradient_seconds(count, across, hardware) < gradient_seconds(count, inside, hardware)


def test_a_second_shard_keeps_half_of_the_gathers_inside_a_node() -> None:
    base, count = PROFILES["h100"], 1e9
    slow = replace(base, far=replace(base.far, bandwidth=1e9))
    without = case("full", dp=16)
    inside, everywhere = replace(without, secondary=8), replace(without, secondary=16)
    gathers_and_sums = gradient_seconds(count, without, slow, held=count)
    assert gradient_seconds(count, everywhere, slow, held=count) == gathers_and_sums
    # Over the slow link go weights (2 bytes) twice and gradients (4), then weights once.
    assert gradient_seconds(count, inside, slow, held=count) == pytest.approx(6 / 8 * gathers_and_sums, rel=0.02)
    each = model_state_bytes(LAYER, case("none")).total / 18
    more = model_state_bytes(LAYER, inside).total - model_state_bytes(LAYER, without).total
    assert more == pytest.approx(2 * each / 8)
    assert model_state_bytes(LAYER, everywhere) == model_state_bytes(LAYER, without)


def test_codes_pay_on_slow_links_and_take_memory() -> None:
    base, count = PROFILES["h100"], 1e9
    slow = replace(base, far=replace(base.far, bandwidth=1e9))
    for exact in (case("optimizer", dp=16), case("optimizer", dp=16, size=8)):
        coded = replace(exact, gradient_code="int8", overlap_grad_reduce=True, code_group=8)
        ratio = gradient_seconds(count, exact, slow) / gradient_seconds(count, coded, slow)
        assert 1.5 < ratio < 4, "4 bytes are one, and weights as they were"
        both = replace(coded, weight_code="int8") if exact.shards == 16 else coded
        assert both is coded or gradient_seconds(count, both, slow) < gradient_seconds(count, coded, slow)
        more = model_state_bytes(LAYER, coded).total - model_state_bytes(LAYER, exact).total
        numbers = model_state_bytes(LAYER, exact).gradients / 4
        assert more == pytest.approx(4 * numbers / 8)
        if exact.shards == 16:
            one_level = replace(coded, code_group=1)
            assert gradient_seconds(count, one_level, slow) > gradient_seconds(count, exact, slow), "8 of a node send"
    assert gradient_seconds(count, coded, base) > 0.5 * gradient_seconds(count, exact, base), "a fast link gains little"
    for code in ("bf16", "int8", "fp8"):
        assert coded_bytes(code) == Coded(code).encode(torch.zeros(1, 1 << 20)).numel() / (1 << 20)


def test_the_search_shares_weights_where_state_does_not_fit() -> None:
    space = Space(tp=(1,), pp=(1,), micro_batch=(1,), recompute=("full",), placement=("stages",), offload=())
    free = search(SMALL, 8, PROFILES["a100"], space=space)
    peak = {each.candidate.sharding: each.step.peak for each in free.best}
    assert set(peak) == {*KINDS} - {"none"}, "which saves a little of the update at best"
    room = (peak["full"] + min(peak["optimizer"], peak["optimizer_gradients"])) / 2
    tight = search(SMALL, 8, replace(PROFILES["a100"], memory=room), space=space)
    assert [each.candidate.sharding for each in tight.best] == ["full"]
    assert tight.config(SMALL).parallel.data_parallel_sharding == "full"
