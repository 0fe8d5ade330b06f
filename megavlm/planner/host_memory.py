"""Predict the bytes of host memory that `--offload` needs, for each pipeline rank and for a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megavlm.arch.kind import FP32
from megavlm.arch.kinds import saved_bytes
from megavlm.arch.scenario import HOST_PIECE, Recompute, Scenario
from megavlm.arch.schedules import peak_in_flight, scenario_shape
from megavlm.planner.cost import held_parameters, trained_parameters
from megavlm.planner.hardware import Hardware
from megavlm.planner.memory import is_offloaded, moments_here, parameters_here, state_numbers

GIB = 2**30
# torch gives out pinned memory in powers of two: at worst twice what is asked for, on average over sizes 1 / ln 2.
_ROUNDED_UP = 1.44


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory of one rank. Activations and pieces never exist at the same time."""

    moments: float = 0.0
    parameters: float = 0.0  # of ZeRO-3, pinned: a rank's rows, and their gradients
    activations: float = 0.0  # pinned
    pieces: float = 0.0  # weights and gradients in transit for an update, at most two pieces; moments read from a disk
    disk: float = 0.0  # moments that are kept on a disk

    @property
    def total(self) -> float:
        return self.moments + self.parameters + max(self.activations, self.pieces)

    def __add__(self, other: HostMemory) -> HostMemory:
        return HostMemory(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def host_memory(
    scenario: Scenario, bounds: Sequence[int], rank: int, *, recompute: Recompute, skip: int = 0
) -> HostMemory:
    """Return the peak host memory of one pipeline rank; arguments as for `memory.rank_memory`."""
    spans = [(max(a, skip), b) for a, b in pairwise(bounds)]
    chunks = scenario.dims.chunks_of(rank)
    saved = 0.0
    for chunk, count in zip(chunks, peak_in_flight(scenario_shape(scenario))[rank], strict=True):
        names = scenario.names[slice(*spans[chunk])]
        saved += count * sum(pinned_bytes(name, scenario, recompute) for name in names)
    own, held = (
        sum(sum(count(layout, *spans[chunk]) for chunk in chunks) / layout.shards for layout in scenario.layouts)
        for count in (trained_parameters, held_parameters)
    )
    return HostMemory(activations=saved) + of_rows(own, held, scenario) + of_update(own, scenario)


def pinned_bytes(name: str, scenario: Scenario, recompute: Recompute = "none") -> float:
    """Return the bytes of pinned host memory for a layer's offloaded activations of one micro-batch."""
    if not is_offloaded(name, scenario):
        return 0.0
    return saved_bytes(name, scenario, recompute) * (_ROUNDED_UP if scenario.on_gpu else 1.0)


def of_rows(own: float, held: float, scenario: Scenario) -> HostMemory:
    """Return the host memory for ZeRO-3's offloaded parameters, of which a rank holds `held` and updates `own`."""
    if parameters_here(scenario):
        return HostMemory()
    gradients = FP32 * own * scenario.on_gpu  # on a CPU they stay where they are summed
    rows = FP32 * own + gradients + scenario.bytes_each * (held - own)
    return HostMemory(parameters=rows * (_ROUNDED_UP if scenario.on_gpu else 1.0))


def of_update(own: float, scenario: Scenario) -> HostMemory:
    """Return the host memory for the offloaded optimizer state of a rank that updates `own` parameters. All are taken
    to be updated elementwise, which keeps the most state. Weight averages stay in memory even if state is on a disk.
    """
    if moments_here(scenario):
        return HostMemory()
    numbers = state_numbers(scenario)
    state, averages = numbers * FP32 * own, FP32 * own * (scenario.optimizer.ema_decay > 0)
    pieces = 2 * FP32 * min(own, 2 * HOST_PIECE)
    if not (parameters_here(scenario) or scenario.moments_on_disk):  # all that an update needs is there
        pieces = 0.0
    if scenario.moments_on_disk:  # but for that of three pieces
        pieces += numbers * FP32 * min(own, HOST_PIECE) * 3
        return HostMemory(moments=averages, pieces=pieces, disk=state)
    return HostMemory(moments=state + averages, pieces=pieces)


def node_bytes(ranks: Sequence[HostMemory], world: int, hardware: Hardware) -> float:
    """Return the host bytes of a node, if each of its ranks takes as much as the fullest rank of all."""
    return max(each.total for each in ranks) * min(world, hardware.devices_per_node)


def node_memory_error(ranks: Sequence[HostMemory], world: int, hardware: Hardware) -> str | None:
    """Return an error message if the offloaded tensors of a node's ranks exceed its host memory, else None."""
    needed, there = node_bytes(ranks, world, hardware), hardware.own_host.memory
    if needed <= there:
        return None
    return f"--offload needs {needed / GIB:.0f} GiB of a node's memory, of which {there / GIB:.0f} GiB can be had"


def host_line(ranks: Sequence[HostMemory], world: int, hardware: Hardware) -> str:
    """Return a line for people with the host memory of the fullest rank, by part, and of a node."""
    fullest = max(ranks, key=lambda each: each.total)
    parts = (
        ("moments", fullest.moments),
        ("parameters", fullest.parameters),
        ("activations", fullest.activations),
        ("on their way", fullest.pieces),
        ("on disk", fullest.disk),
    )
    shares = ", ".join(f"{name} {value / GIB:.2f}" for name, value in parts if value)
    node, there = node_bytes(ranks, world, hardware) / GIB, hardware.own_host.memory / GIB
    free_memory = f" of {there:.0f}" if there < float("inf") else ""
    return f"host memory of the fullest rank, GiB: {shares}; of a node {node:.1f}{free_memory}"
