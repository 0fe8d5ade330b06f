"""Measure how fast ranks talk: all-reduce and all-gather by group, and both directions between each two nodes.

Bandwidth is per rank. That of a collective is what a ring moves over each link: 2 (n − 1) / n of the tensor for an
all-reduce, (n − 1) / n of the result for an all-gather, in the time that it takes (the "bus bandwidth" of nccl-tests).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

ALL_REDUCE, ALL_GATHER, EXCHANGE = "all-reduce", "all-gather", "exchange"
NODE, RAIL, WORLD, PAIR = "within nodes", "across nodes", "all ranks", "two nodes"
_GPU_BYTES, _CPU_BYTES = 2**28, 2**22
_REPEATS = 8


@dataclass(frozen=True)
class Measured:
    """What one rank measured. `nodes` are the numbers of those that took part."""

    what: str
    kind: str  # of the group
    nodes: tuple[int, ...]
    bandwidth: float  # bytes/s


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds in which each of `count` meets another, until all have met (the circle method of tournaments)."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(players) - 1):
        half = len(players) // 2
        facing = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        players = [players[0], players[-1], *players[1:-1]]


def rails(nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the ranks of each place within a node: they talk over the same adapter of their nodes."""
    return [[ranks[place] for ranks in nodes if place < len(ranks)] for place in range(max(map(len, nodes)))]


def measure(nodes: Sequence[Sequence[int]], device: torch.device, *, part: Callable[[str], None]) -> list[Measured]:
    """Return what this rank measures; every rank calls this. `part` is told what begins.

    The groups of a kind run at the same time, as they do in training. torch.distributed is initialized.
    """
    own = dist.get_rank()
    node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    everyone = sorted(node_of)
    kinds: list[tuple[str, Sequence[Sequence[int]]]] = [(NODE, nodes), (WORLD, [everyone])]
    if len(nodes) > 1 and max(map(len, nodes)) > 1:
        kinds.insert(1, (RAIL, rails(nodes)))
    found = []
    for kind, groups in kinds:
        part(f"connect {kind}")
        made = [(ranks, dist.group.WORLD if kind == WORLD else dist.new_group(list(ranks))) for ranks in groups]
        ranks, group = next((ranks, group) for ranks, group in made if own in ranks)
        if len(ranks) == 1:
            continue
        taking_part = tuple(sorted({node_of[rank] for rank in ranks}))
        for what, collective in ((ALL_REDUCE, _all_reduce), (ALL_GATHER, _all_gather)):
            part(f"{what}, {kind}")
            found.append(Measured(what, kind, taking_part, collective(group, len(ranks), device)))
    found += _exchanges(nodes, device, part=part)
    return found


def _exchanges(
    nodes: Sequence[Sequence[int]], device: torch.device, *, part: Callable[[str], None]
) -> Iterator[Measured]:
    """Yield both directions at once between this rank and that of the same place on each other node."""
    own = dist.get_rank()
    mine, place = next((node, list(ranks).index(own)) for node, ranks in enumerate(nodes) if own in ranks)
    for pairs in rounds(len(nodes)):
        pair = next((pair for pair in pairs if mine in pair), None)
        part("a round without an exchange" if pair is None else f"exchange between nodes {pair[0]} and {pair[1]}")
        if pair is None:
            continue
        other = nodes[pair[0] if pair[1] == mine else pair[1]]
        if place < len(other):
            yield Measured(EXCHANGE, PAIR, pair, _exchange(other[place], device))


def _all_reduce(group: dist.ProcessGroup | None, size: int, device: torch.device) -> float:
    values = torch.ones(_bytes(device) // 4, device=device)
    seconds = _seconds(lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group), device)
    return 2 * (size - 1) / size * values.nbytes / seconds


def _all_gather(group: dist.ProcessGroup | None, size: int, device: torch.device) -> float:
    part = torch.ones(_bytes(device) // size, dtype=torch.uint8, device=device)
    whole = torch.empty(size * part.nbytes, dtype=torch.uint8, device=device)
    seconds = _seconds(lambda: dist.all_gather_into_tensor(whole, part, group=group), device)
    return (size - 1) / size * whole.nbytes / seconds


def _exchange(peer: int, device: torch.device) -> float:
    sent = torch.ones(_bytes(device) // 2, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def both() -> None:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        ):
            work.wait()

    return sent.nbytes / _seconds(both, device)


def _bytes(device: torch.device) -> int:
    return _CPU_BYTES if device.type == "cpu" else _GPU_BYTES


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the mean seconds of calls that wait for other ranks, after one that is not counted: a node that stands
    still now and then is slow, too.
    """
    began = 0.0
    for number in range(_REPEATS + 1):
        if number == 1:
            began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return max((time.perf_counter() - began) / _REPEATS, 1e-9)
