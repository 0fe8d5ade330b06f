"""Model state in the planner: what ranks share, what leaves the device, what optimizers keep, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from megavlm.arch.dims import Dims
from megavlm.arch.kinds import saved_bytes
from megavlm.arch.scenario import HOST_PIECE, Offloaded, Scenario, Sharding, encoder_scenario, scenario_of
from megavlm.config.optimizer_schema import newton_schulz_flops
from megavlm.optim.codes import Coded
from megavlm.planner.auto import offload_memory_error, predict
from megavlm.planner.candidates import Space
from megavlm.planner.cost import coded_bytes, gradient_seconds, host_update_seconds, layer_seconds, optimizer_seconds
from megavlm.planner.hardware import PROFILES, Hardware
from megavlm.planner.host_memory import host_line, host_memory, node_memory_error
from megavlm.planner.memory import kept_bytes, matrix_bytes, matrix_seconds, model_state_bytes, rank_memory
from megavlm.planner.report import report
from megavlm.planner.search import search
from megavlm.rules.check import check
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


H100 = PROFILES["h100"]
BOTH: tuple[Offloaded, ...] = ("optimizer", "activations")
SPACE = Space(tp=(1,), pp=(1,), micro_batch=(1,), recompute=("none",), placement=("stages",), sharding=("optimizer",))


def offloaded(*offload: Offloaded, sharding: Sharding = "optimizer", precision: str = "bf16", dp: int = 8) -> Scenario:
    config = replace(
        SMALL,
        parallel=replace(SMALL.parallel, data_parallel_sharding=sharding),
        execution=replace(SMALL.execution, offload=offload),
        precision=replace(SMALL.precision, dtype=precision),
    )
    return scenario_of(config, Dims(1, 1, 1, dp), on_gpu=True)


@pytest.mark.parametrize(
    ("sharding", "precision", "here", "left"),
    [
        ("none", "bf16", 18, 10),
        ("optimizer", "bf16", 6 + 12 / 8, 6 + 4 / 8),
        ("optimizer", "fp32", 8 + 8 / 8, 8),
        ("optimizer_gradients", "bf16", 2 + 16 / 8, 2 + 8 / 8),
        ("full", "bf16", 16 / 8, 8 / 8),
    ],
)
def test_moments_leave_the_device(sharding: Sharding, precision: str, here: float, left: float) -> None:
    whole, off = (offloaded(*each, sharding=sharding, precision=precision) for each in ((), ("optimizer",)))
    count = model_state_bytes(LAYER, replace(whole, sharding="none")).weights / whole.bytes_each
    assert model_state_bytes(LAYER, whole).total / count == pytest.approx(here)
    assert model_state_bytes(LAYER, off).total / count == pytest.approx(left)
    bounds = [0, len(off.names)]
    moments = host_memory(off, bounds, 0, recompute="none").moments
    gone = rank_memory(whole, bounds, 0, recompute="none").total - rank_memory(off, bounds, 0, recompute="none").total
    assert moments == pytest.approx(gone)


def test_activations_of_layers_leave_but_for_two_layers() -> None:
    whole, off = offloaded(), offloaded("activations")
    bounds = [0, len(off.names)]
    before, after = (rank_memory(each, bounds, 0, recompute="none") for each in (whole, off))
    layers = [name for name in off.names if ".layers." in name]
    saved = sum(saved_bytes(name, whole) for name in layers)
    assert before.activations - after.activations == pytest.approx(saved)
    assert kept_bytes("output", off) == saved_bytes("output", whole)
    largest = max(saved_bytes(name, whole) for name in layers)
    assert 0 < after.transient - max(0, before.transient - 2 * largest) <= 3 * largest
    pinned = host_memory(off, bounds, 0, recompute="none").activations
    assert saved < pinned < 2 * saved, "pinned memory comes in powers of two"
    assert host_memory(whole, bounds, 0, recompute="none").total == 0


def test_the_bus_and_the_host_take_time() -> None:
    host = H100.own_host
    count = 1e9
    travel, update = 12 * count / host.link.bandwidth, 28 * count / host.bandwidth
    assert max(travel, update) < host_update_seconds(count, H100) < travel + update
    assert host_update_seconds(HOST_PIECE / 2, H100) == pytest.approx(HOST_PIECE / 2 / count * (travel + update))
    assert optimizer_seconds(count, offloaded("optimizer"), H100) > optimizer_seconds(count, offloaded(), H100)
    unfused = replace(offloaded(), fused_gradients=False)  # products add no weight gradients while activations travel
    plain, off = layer_seconds(LAYER, unfused, H100), layer_seconds(LAYER, offloaded("activations"), H100)
    copy = host.link.seconds(saved_bytes(LAYER, offloaded()))
    total = max(plain.forward, copy) + max(plain.backward, copy)
    assert off.forward + off.backward == pytest.approx(total), "each beside the other layers' passes"
    fast = replace(H100, host=replace(host, link=replace(host.link, bandwidth=1e15, latency=0.0)))
    assert layer_seconds(LAYER, offloaded("activations"), fast) == plain
    assert layer_seconds("output", offloaded("activations"), H100) == layer_seconds("output", offloaded(), H100)
    on_cpu = replace(offloaded("activations"), on_gpu=False)
    hidden = layer_seconds(LAYER, replace(on_cpu, offload=()), PROFILES["cpu"])
    assert layer_seconds(LAYER, on_cpu, PROFILES["cpu"]).backward > hidden.backward


def test_moments_on_a_disk_take_no_memory_and_the_disks_time() -> None:
    config = replace(SMALL, execution=replace(SMALL.execution, offload=("optimizer=nvme:/disk", "activations")))
    disk = scenario_of(config, Dims(1, 1, 1, 8), on_gpu=True)
    assert (disk.offload, disk.moments_on_disk) == (BOTH, True)
    host = replace(disk, moments_on_disk=False)
    there, here = (host_memory(each, [0, len(each.names)], 0, recompute="none") for each in (disk, host))
    assert (there.moments, there.disk) == (0, here.moments)
    assert there.pieces == pytest.approx(here.pieces + 3 * min(here.moments, 8 * HOST_PIECE)), "of three pieces"
    count, rate = 1e9, H100.own_host.disk
    assert 8 * count / rate < host_update_seconds(count, H100, on_disk=True) < 1.1 * 8 * count / rate
    fast = replace(H100, host=replace(H100.own_host, disk=1e15))
    assert host_update_seconds(count, fast, on_disk=True) == pytest.approx(host_update_seconds(count, fast))
    best = search(config, 8, H100, space=SPACE).best[0]
    assert best.candidate.applied(config).execution.offload == ("optimizer=nvme:/disk", "activations")
    assert "on disk" in host_line(best.step.host, 8, H100)


def test_parameters_leave_the_device_and_cross_the_bus() -> None:
    whole = replace(offloaded("optimizer", sharding="full"), micro_batches=1)
    off, bounds = replace(whole, offload=("optimizer", "parameters")), [0, len(whole.names)]
    count = model_state_bytes(LAYER, whole).total / (8 / 8)
    assert model_state_bytes(LAYER, off).total == 0, "4 of weights and 4 of gradients, on 8 ranks"
    frozen = replace(off, own=frozenset())
    assert model_state_bytes(LAYER, frozen).total == 0
    assert model_state_bytes(LAYER, replace(off, secondary=4)).total == pytest.approx(2 * count / 4)
    here, there = (host_memory(each, bounds, 0, recompute="none") for each in (whole, off))
    assert there.parameters == pytest.approx(1.44 * here.moments), "8 bytes each, pinned"
    assert (there.moments, there.pieces) == (here.moments, 0), "an update copies nothing"
    still = host_memory(frozen, bounds, 0, recompute="none")
    assert (still.moments, still.parameters) == (0, pytest.approx(there.parameters / 8 * 2))
    assert "parameters" in host_line([there], 8, H100)

    own, link, host = 1e9, H100.own_host.link, H100.own_host.bandwidth
    assert optimizer_seconds(8 * own, off, H100) > 28 * own / host > optimizer_seconds(8 * own, whole, H100) / 4
    slow = replace(H100, host=replace(H100.own_host, link=replace(link, bandwidth=link.bandwidth / 100)))
    fast = gradient_seconds(8 * own, whole, H100, held=8 * own)
    bus = 2 * off.micro_batches * 4 * own / slow.own_host.link.bandwidth
    assert gradient_seconds(8 * own, off, slow, held=8 * own) == pytest.approx(bus, rel=0.01)
    again = replace(off, secondary=4)
    assert gradient_seconds(8 * own, again, slow, held=8 * own) == pytest.approx(bus / 2, rel=0.01)
    assert gradient_seconds(8 * own, whole, slow, held=8 * own) == fast
    more = optimizer_seconds(8 * own, replace(off, micro_batches=3), H100) - optimizer_seconds(8 * own, off, H100)
    assert more == pytest.approx(2 * 12 * own / host), "the host adds gradients of micro-batches"
    alone = replace(off, dims=Dims(1, 1, 1, 1))
    assert gradient_seconds(own, alone, slow, held=own) == pytest.approx(bus, rel=0.01)


def room_for(*offload: Offloaded, hardware: Hardware = H100) -> Hardware:
    """A device in which a layout fits with so much offloaded, and little more."""
    config = replace(SMALL, execution=replace(SMALL.execution, offload=offload))
    fullest = max(predict(config, Dims(1, 1, 1, 8), hardware).memory, key=lambda memory: memory.total)
    return replace(hardware, memory=1.02 * fullest.total - 0.02 * fullest.communicators)


def test_the_search_offloads_as_little_as_gives_room() -> None:
    roomy = search(SMALL, 8, H100, space=SPACE)
    assert roomy.best[0].candidate.offload == ()
    for wanted in (("optimizer",), BOTH):
        hardware = room_for(*wanted)
        outcome = search(SMALL, 8, hardware, space=SPACE)
        best = outcome.best[0]
        assert best.candidate.offload == wanted
        assert best.step.peak <= hardware.memory
        assert best.step.seconds > roomy.best[0].step.seconds
        config = outcome.config(SMALL)
        assert config.execution.offload == wanted
        check(config, world=8)
        assert "host memory of the fullest rank" in report(outcome)
        assert not search(SMALL, 8, hardware, space=replace(SPACE, offload=())).best


def test_a_node_without_room_is_refused() -> None:
    hardware = room_for("optimizer")
    small = replace(hardware, host=replace(hardware.own_host, memory=1e6))
    outcome = search(SMALL, 8, small, space=SPACE)
    assert not outcome.best
    step = predict(replace(SMALL, execution=replace(SMALL.execution, offload=BOTH)), Dims(1, 1, 1, 8), small)
    assert "of a node's memory" in (node_memory_error(step.host, 8, small) or "")
    assert node_memory_error(step.host, 8, hardware) is None
    assert any("--offload needs" in each.reason for each in outcome.rejected)


def test_a_run_says_where_its_node_has_too_little() -> None:
    config, dims = replace(SMALL, execution=replace(SMALL.execution, offload=BOTH)), Dims(1, 1, 1, 8)
    needed = predict(config, dims, H100).host[0].total
    few, many = (offload_memory_error(config, dims, node_memory=4 * needed, devices=count) for count in (2, 8))
    assert few is None, "three quarters of four times as much hold two"
    assert "of a node's memory" in (many or "")
    assert offload_memory_error(SMALL, dims, node_memory=0.0, devices=8) is None


def of_optimizer(kind: str, *, tp: int = 1, dp: int = 1, averages: float = 0.0) -> Scenario:
    optimizer = replace(SMALL.optimizer, kind=kind, ema_decay=averages)  # type: ignore[arg-type]
    precision = replace(SMALL.precision, dtype="bf16")
    return scenario_of(replace(SMALL, optimizer=optimizer, precision=precision), Dims(tp, 1, 1, dp), on_gpu=True)


def test_state_is_four_bytes_a_number() -> None:
    found = {kind: model_state_bytes(LAYER, of_optimizer(kind)) for kind in ("adamw", "muon", "lion")}
    count = found["adamw"].weights / 2
    language = SMALL.model.language
    hidden, ffn = language.hidden_size, language.ffn_hidden_size
    rows = (2 * language.num_attention_heads + 2 * (language.num_query_groups or language.num_attention_heads)) * (
        language.kv_channels or hidden // language.num_attention_heads
    )
    assert found["adamw"].optimizer == 12 * count
    assert found["lion"].optimizer == 8 * count
    assert found["muon"].optimizer == 12 * count - 4 * hidden * (rows + 3 * ffn)
    assert model_state_bytes(LAYER, of_optimizer("lion", averages=0.9)).optimizer == 12 * count
    halves = model_state_bytes(LAYER, of_optimizer("muon", tp=2)).optimizer / found["muon"].optimizer
    assert halves == pytest.approx(0.5, rel=0.01)  # but for norms


def test_the_host_and_a_disk_have_what_a_rule_keeps() -> None:
    """Averages are in memory even where state is on a disk."""
    found = {}
    for kind in ("adamw", "lion"):
        off = replace(of_optimizer(kind, averages=0.9), offload=("optimizer",))
        for name, scenario in (("host", off), ("disk", replace(off, moments_on_disk=True))):
            found[kind, name] = host_memory(scenario, [0, len(off.names)], 0, recompute="none")
    one = found["lion", "disk"].disk
    assert found["adamw", "disk"].disk == 2 * one
    assert found["adamw", "disk"].moments == found["lion", "disk"].moments == one
    assert (found["adamw", "host"].moments, found["lion", "host"].moments) == (3 * one, 2 * one)
    adamw, lion = (host_update_seconds(1e9, H100, state=state, on_disk=True) for state in (2, 1))
    assert lion == pytest.approx(adamw / 2, rel=0.1), "the disk's time"


def test_ranks_share_the_matrices_of_their_stage() -> None:
    names = (LAYER,)
    alone, shared = (matrix_seconds(names, of_optimizer("muon", dp=dp), H100) for dp in (1, 2))
    shapes = [(64, 64)]  # the rate alone
    assert matrix_seconds(names, of_optimizer("adamw"), H100) == 0
    assert alone * H100.forward.matmul > newton_schulz_flops(SMALL.optimizer, *shapes[0])
    assert alone / 2 < shared - 2 * H100.near.latency < alone
    assert matrix_bytes(names, of_optimizer("lion")) == 0
    one, eight = (matrix_bytes(names, of_optimizer("muon", dp=dp)) for dp in (1, 8))
    assert eight < one
