"""Check all nodes of a run together, before it starts: what they have, their clocks, how fast they compute and talk.

The ranks talk through the store until the links are measured, so that what is wrong with links is found and not met.
Nothing waits for ever (`parts`). Rank 0 collects; the others only serve.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megavlm.parallel.rendezvous import Meeting
from megavlm.programs.doctor.device_rates import rates_of
from megavlm.programs.doctor.links import Measured, measure
from megavlm.programs.doctor.node import facts_of_node
from megavlm.programs.doctor.parts import Parts
from megavlm.programs.doctor.world_problems import Bandwidth, Clock, Survey
from megavlm.world import World

_PINGS = 20
_PATIENCE = 5.0  # seconds
_SHORT, _LONG = 0.001, 0.25  # seconds between two looks at the store


class Office:
    """What the ranks of a check tell one another through the store: never waits longer than `parts` allows."""

    def __init__(self, met: Meeting) -> None:
        self.rank, self.world, self._store = met.rank, met.world, met.store

    def tell(self, what: str, value: Any) -> None:
        self._store.set(f"doctor/{what}/{self.rank}", json.dumps(value))

    def hear(self, what: str, rank: int) -> Any:
        """Return what a rank told, once it has. Looks are ever further apart: thousands of ranks share one store."""
        key, pause = f"doctor/{what}/{rank}", _SHORT
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(1.2 * pause, _LONG)
        return json.loads(self._store.get(key))

    def hear_all(self, what: str, ranks: Iterable[int]) -> list[Any]:
        return [self.hear(what, rank) for rank in ranks]

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Return what all ranks told, on all ranks; rank 0 hands it round, so that each key is read once or twice."""
        self.tell(what, value)
        if self.rank == 0:
            self.tell(f"all of {what}", self.hear_all(what, range(self.world)))
        found: list[Any] = self.hear(f"all of {what}", 0)
        return found


def survey_world(
    met: Meeting, place: World, *, host: str, package: Path, parts: Parts, measures: bool = True
) -> Survey | None:
    """Return what all nodes told and measured, on rank 0; None on the others."""
    office = Office(met)
    parts.begin("facts")
    nodes = _nodes_of(office, place)
    leaders = [ranks[0] for ranks in nodes]
    if met.rank in leaders:
        office.tell("facts", {"host": host, "facts": facts_of_node(package)})
    told = office.hear_all("facts", leaders) if met.rank == 0 else []
    parts.begin("clocks")
    clocks = _clocks(office, leaders)
    rates, measured = {}, []
    device = _device(place)
    if measures and _each_has_a_device(office, device):
        parts.begin("rates of devices")
        found = rates_of(_name(device), on_gpu=device.type == "cuda", index=device.index or 0)
        office.tell("rates", {rate.what: rate.measured for rate in found})
        parts.begin("connect")
        _connect(met, device)
        links = measure(nodes, device, part=parts.begin)
        office.tell("links", [asdict(each) for each in links])
        if met.rank == 0:
            parts.begin("collect")
            rates = dict(enumerate(office.hear_all("rates", range(met.world))))
            measured = list(enumerate(office.hear_all("links", range(met.world))))
    parts.begin("end")
    if met.rank > 0:
        office.hear("done", 0)
        met.store.add("doctor/gone", 1)  # rank 0 may keep the store, and ends after all others
        return None
    return Survey(
        names=_names([each["host"] for each in told]),
        ranks=tuple(map(tuple, nodes)),
        facts=tuple(each["facts"] for each in told),
        on_gpu=device.type == "cuda",
        clocks=tuple(clocks),
        rates=rates,
        bandwidths=slowest(
            (rank, Measured(**{**each, "nodes": tuple(each["nodes"])})) for rank, own in measured for each in own
        ),
    )


def release(met: Meeting) -> None:
    """Let the other ranks end, once rank 0 has all that it needs of them, and wait some seconds until they do."""
    Office(met).tell("done", True)
    end = time.monotonic() + _PATIENCE
    while met.store.add("doctor/gone", 0) < met.world - 1 and time.monotonic() < end:
        time.sleep(_SHORT)


def slowest(measured: Iterable[tuple[int, Measured]]) -> tuple[Bandwidth, ...]:
    """Return one bandwidth for each measurement: that of the slowest of the ranks that took part."""
    same: dict[tuple[str, str, tuple[int, ...]], list[tuple[float, int]]] = defaultdict(list)
    for rank, each in measured:
        same[each.what, each.kind, each.nodes].append((each.bandwidth, rank))
    return tuple(Bandwidth(what, kind, nodes, *min(values)) for (what, kind, nodes), values in same.items())


def _nodes_of(office: Office, place: World) -> list[list[int]]:
    """Return the ranks of each node: those whose rank less the local rank is equal."""
    by_first: dict[int, list[int]] = defaultdict(list)
    for rank, first in enumerate(office.exchange("first", place.rank - place.local_rank)):
        by_first[first].append(rank)
    return [by_first[first] for first in sorted(by_first)]


def _names(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts' names; with the node's number where several nodes are on one host."""
    return tuple(host if hosts.count(host) == 1 else f"{host}#{number}" for number, host in enumerate(hosts))


def _clocks(office: Office, leaders: Sequence[int], *, now: Callable[[], float] = time.time) -> list[Clock]:
    """Return each node's clock against rank 0's, on rank 0: of several round trips the shortest counts.

    A node answers with its own time, which is that of some moment within the round trip: if t₀ and t₁ are rank 0's
    times before and after, the node is ahead by its time − (t₀ + t₁) / 2, to within (t₁ − t₀) / 2 (Cristian 1989).
    """
    if office.rank != 0:
        if office.rank in leaders:
            for ping in range(_PINGS):
                office.hear(f"ping/{ping}/{office.rank}", 0)
                office.tell(f"pong/{ping}", now())
        return []
    found = [Clock(0.0, 0.0)]
    for leader in leaders[1:]:
        trips = []
        for ping in range(_PINGS):
            before = now()
            office.tell(f"ping/{ping}/{leader}", True)
            answer = office.hear(f"pong/{ping}", leader)
            after = now()
            trips.append(Clock(answer - (before + after) / 2, (after - before) / 2))
        found.append(min(trips, key=lambda clock: clock.within))
    return found


def _device(place: World) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else place.local_rank)


def _each_has_a_device(office: Office, device: torch.device) -> bool:
    """Return whether every rank has a device of the same type; else only what the nodes told can be compared."""
    there = device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()
    types = set(office.exchange("device", device.type if there else "none"))
    return len(types) == 1 and "none" not in types


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _connect(met: Meeting, device: torch.device) -> None:
    """Initialize torch.distributed, unless it is. Its own time limit is far: the parts' comes first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=met.store,
            rank=met.rank,
            world_size=met.world,
            timeout=timedelta(hours=1),
            device_id=device if device.type == "cuda" else None,
        )
