"""Check all nodes of a run together before it starts: versions and devices, compute rates, and bandwidths of links.

Facts are gathered over gloo, so that links are measured last. Every collective has a time limit. When one fails, the
ranks that still answer write so to the store, and the other ranks are reported.

Bandwidth is per rank. The bandwidth of an all-reduce is the data that a ring moves over each link, 2 (n − 1) / n of the
tensor, divided by the time (the "bus bandwidth" of nccl-tests).
"""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megavlm.parallel.rendezvous import Meeting, of_all_ranks
from megavlm.program import output_of
from megavlm.programs.doctor.machine import rates_of, times_of
from megavlm.programs.doctor.problems import EXCHANGE, WITHIN, WORLD, Problem, Survey
from megavlm.world import World

PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy", "transformers")
# Variables that affect communication, in addition to all of NCCL's.
_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "FI_PROVIDER",
    "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
)
_GPU_BYTES, _CPU_BYTES = 2**28, 2**22  # size of the tensors that are sent
_ROLL_CALL = 5.0  # seconds for ranks whose collective failed to report to the store


class Check:
    """One rank's side of a check of all nodes: the current part, its time limit, and the cause if a part fails."""

    def __init__(self, met: Meeting, *, limit: float) -> None:
        """Begin a check on a rank that has met the others. `limit` is in seconds, for each collective."""
        self._met, self.limit, self.part = met, limit, "start"

    def connect(self, device: torch.device) -> None:
        """Initialize torch.distributed with gloo, and NCCL for tensors on a GPU, unless it is initialized already."""
        if dist.is_initialized():
            return
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a collective that takes too long raises, and does not abort
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=self._met.store,
            rank=self._met.rank,
            world_size=self._met.world,
            timeout=timedelta(seconds=self.limit),
        )

    def blame(self, reason: str) -> Problem | None:
        """Return a problem that names the silent ranks, or why a collective failed on this rank if all answer.

        Only the first rank that calls it returns a problem, the others None; but any rank reports a lost store.
        """
        store, rank, world = self._met.store, self._met.rank, self._met.world
        try:
            store.set(f"doctor/there/{rank}", self.part)
            if store.add("doctor/failed", 1) > 1:
                time.sleep(2 * _ROLL_CALL)  # torchrun ends all ranks when one exits
                return None
            time.sleep(_ROLL_CALL)
            silent = [other for other in range(world) if not store.check([f"doctor/there/{other}"])]
        except dist.DistError as error:
            what = f"rank {rank}: the store at MASTER_ADDR does not answer (in: {self.part}): {_first_line(error)}"
            return Problem("error", what, "look at rank 0's output and at that of its torchrun")
        if silent:
            shown = ", ".join(map(str, silent[:8])) + (f" and {len(silent) - 8} more" if len(silent) > 8 else "")
            what = f"rank{'s'[: len(silent) > 1]} {shown} of {world} did not answer within {self.limit:.0f} s (in: "
            remedy = "look at its process and host: stopped, swapping, or cut off from the network"
            return Problem("error", f"{what}{self.part})", remedy)
        what = f"rank {rank} of {world}: {reason} (in: {self.part})"
        remedy = "NCCL_DEBUG=INFO says more of a link; NCCL_SOCKET_IFNAME, firewall; or a longer --timeout"
        return Problem("error", what, remedy)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def survey_world(check: Check, place: World, *, host: str, package: Path, measures: bool = True) -> Survey | None:
    """Gather the facts and measurements of all nodes; return them on rank 0, None on the other ranks."""
    device = _device(place)
    check.part = "connect"
    check.connect(device)
    check.part = "facts"
    dist.monitored_barrier(timeout=timedelta(seconds=check.limit), wait_all_ranks=True)
    there = device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()
    all_ranks: list[dict[str, Any]] = of_all_ranks(
        {
            "first": place.rank - place.local_rank,  # equal on the ranks of a node
            "host": host,
            "device": device.type if there else "none",
            "facts": facts_of_node(package) if place.local_rank == 0 else {},
        }
    )
    by_first: dict[int, list[int]] = defaultdict(list)
    for rank, each in enumerate(all_ranks):
        by_first[each["first"]].append(rank)
    nodes = [by_first[first] for first in sorted(by_first)]
    hosts = [all_ranks[ranks[0]]["host"] for ranks in nodes]
    names = [name if hosts.count(name) == 1 else f"{name}#{number}" for number, name in enumerate(hosts)]
    speeds: Mapping[str, Mapping[int, float]] = {}
    types = {each["device"] for each in all_ranks}
    if measures and len(types) == 1 and "none" not in types:  # else only the facts can be compared
        check.part = "rates of devices"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        rates = rates_of(name, on_gpu=device.type == "cuda", index=device.index or 0)
        mine = [*((rate.what, rate.measured) for rate in rates), *_links(check, nodes, device)]
        speeds = speeds_of(of_all_ranks(mine))
    if dist.get_rank() != 0:
        return None
    return Survey(
        names=tuple(names),
        ranks=tuple(map(tuple, nodes)),
        facts=tuple(all_ranks[ranks[0]]["facts"] for ranks in nodes),
        on_gpu=device.type == "cuda",
        speeds=speeds,
    )


def speeds_of(measured: Iterable[Iterable[tuple[str, float]]]) -> dict[str, dict[int, float]]:
    """Return the speed of each rank by kind of measurement, given the measurements of each rank in order.

    Several exchanges of a rank count by their median, of two the higher: a slow partner is not the rank's fault.
    """
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rank, mine in enumerate(measured):
        for what, speed in mine:
            found[what][rank].append(speed)
    return {
        what: {rank: statistics.median_high(each) for rank, each in of_ranks.items()}
        for what, of_ranks in found.items()
    }


def _device(place: World) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else place.local_rank)
    if (device.index or 0) < torch.cuda.device_count():
        torch.cuda.set_device(device)
    return device


def _links(check: Check, nodes: Sequence[Sequence[int]], device: torch.device) -> Iterator[tuple[str, float]]:
    """Measure this rank's links; yield the kind and the bandwidth of each measurement in bytes/s."""
    own = dist.get_rank()
    mine, place = next((node, list(ranks).index(own)) for node, ranks in enumerate(nodes) if own in ranks)
    check.part = WITHIN
    limit = timedelta(seconds=check.limit)  # a new group does not inherit it
    groups = [dist.new_group(list(ranks), timeout=limit) for ranks in nodes]
    if len(nodes[mine]) > 1:  # all nodes at the same time, as in training
        yield WITHIN, _all_reduce(groups[mine], len(nodes[mine]), device)
    check.part = WORLD
    yield WORLD, _all_reduce(None, dist.get_world_size(), device)
    for pairs in rounds(len(nodes)):
        pair = next((pair for pair in pairs if mine in pair), None)
        check.part = (
            "a round without an exchange" if pair is None else f"exchange between nodes {pair[0]} and {pair[1]}"
        )
        if pair is not None:
            other = nodes[pair[0] if pair[1] == mine else pair[1]]
            if place < len(other):
                yield EXCHANGE, _exchange(other[place], device)


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs of `count` nodes until all pairs have met (circle method of tournaments)."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(players) - 1):
        half = len(players) // 2
        facing = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        players = [players[0], players[-1], *players[1:-1]]


def _all_reduce(group: dist.ProcessGroup | None, size: int, device: torch.device) -> float:
    values = torch.ones((_CPU_BYTES if device.type == "cpu" else _GPU_BYTES) // 4, device=device)
    seconds = _seconds(lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group), device)
    return 2 * (size - 1) / size * values.nbytes / seconds


def _exchange(peer: int, device: torch.device) -> float:
    """Return the bandwidth in bytes/s per direction, while both directions of a link are in use."""
    size = (_CPU_BYTES if device.type == "cpu" else _GPU_BYTES) // 2
    sent = torch.ones(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def both() -> None:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        ):
            work.wait()

    return sent.nbytes / _seconds(both, device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the mean seconds of collective calls; the mean, unlike a median, shows ranks that pause now and then."""
    return max(statistics.mean(times_of(call, device)), 1e-9)


def facts_of_node(package: Path) -> dict[str, str]:
    """Return facts of this machine by name. `package` is the folder of the code to compare between nodes."""
    facts = {"python": ".".join(map(str, sys.version_info[:3])), "Linux": platform.release()}
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed"
    code = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        code.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    facts["code"] = code.hexdigest()[:12]
    facts["CUDA of torch"] = str(torch.version.cuda)
    if torch.cuda.is_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    facts["driver"] = "none" if not driver else driver.splitlines()[0].strip()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    facts["GPUs"] = counted(f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in devices)
    for name, value in os.environ.items():
        if name.startswith("NCCL_") or name in _VARIABLES:
            facts[f"${name}"] = value
    return facts


def counted(things: Iterable[str]) -> str:
    """Return counts of equal things as text, sorted: `8 × NVIDIA H200, 1 × …`; `none` if there are none."""
    return ", ".join(f"{number} × {thing}" for thing, number in sorted(Counter(things).items())) or "none"
