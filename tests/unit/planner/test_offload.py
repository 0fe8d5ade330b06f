"""`--offload` in the planner: bytes on both sides, seconds over the bus, and when the search takes to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megavlm.arch.dims import Dims
from megavlm.arch.kinds import saved_bytes
from megavlm.arch.scenario import HOST_PIECE, Offloaded, Scenario, Sharding, scenario_of
from megavlm.planner.auto import offload_memory_error, predict
from megavlm.planner.candidates import Space
from megavlm.planner.cost import gradient_seconds, host_update_seconds, layer_seconds, optimizer_seconds
from megavlm.planner.hardware import PROFILES, Hardware
from megavlm.planner.host_memory import host_line, host_memory, node_memory_error
from megavlm.planner.memory import kept_bytes, model_state_bytes, rank_memory
from megavlm.planner.report import report
from megavlm.planner.search import search
from megavlm.rules.check import check
from tests.support.small_run import SMALL

H100 = PROFILES["h100"]
LAYER = "language.layers.0"
BOTH: tuple[Offloaded, ...] = ("optimizer", "activations")
SPACE = Space(tp=(1,), pp=(1,), micro_batch=(1,), recompute=("none",), placement=("stages",), sharding=("optimizer",))


def case(*offload: Offloaded, sharding: Sharding = "optimizer", precision: str = "bf16", dp: int = 8) -> Scenario:
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
    whole, off = (case(*each, sharding=sharding, precision=precision) for each in ((), ("optimizer",)))
    count = model_state_bytes(LAYER, replace(whole, sharding="none")).weights / whole.bytes_each
    assert model_state_bytes(LAYER, whole).total / count == pytest.approx(here)
    assert model_state_bytes(LAYER, off).total / count == pytest.approx(left)
    bounds = [0, len(off.names)]
    moments = host_memory(off, bounds, 0, recompute="none").moments
    gone = rank_memory(whole, bounds, 0, recompute="none").total - rank_memory(off, bounds, 0, recompute="none").total
    assert moments == pytest.approx(gone)


def test_activations_of_layers_leave_but_for_two_layers() -> None:
    whole, off = case(), case("activations")
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
    assert optimizer_seconds(count, case("optimizer"), H100) > optimizer_seconds(count, case(), H100)
    unfused = replace(case(), fused_gradients=False)  # products add no weight gradients while activations travel
    plain, off = layer_seconds(LAYER, unfused, H100), layer_seconds(LAYER, case("activations"), H100)
    copy = host.link.seconds(saved_bytes(LAYER, case()))
    total = max(plain.forward, copy) + max(plain.backward, copy)
    assert off.forward + off.backward == pytest.approx(total), "each beside the other layers' passes"
    fast = replace(H100, host=replace(host, link=replace(host.link, bandwidth=1e15, latency=0.0)))
    assert layer_seconds(LAYER, case("activations"), fast) == plain
    assert layer_seconds("output", case("activations"), H100) == layer_seconds("output", case(), H100)
    on_cpu = replace(case("activations"), on_gpu=False)
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
    whole = replace(case("optimizer", sharding="full"), micro_batches=1)
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
