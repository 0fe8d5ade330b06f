"""Rules that find problems in the facts and measurements of a run's nodes: pure functions, one per subject.

Slow nodes are found by comparison with the other nodes, and with a planner profile if one is given. With two nodes
there is only one pair, so that only a profile can show that its link is slow.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megavlm.planner.hardware import Hardware
from megavlm.programs.doctor.problems import Level, Problem

# Measurements of links, in bytes/s.
WITHIN, WORLD, EXCHANGE = "all-reduce within nodes", "all-reduce of all ranks", "exchange between two nodes"
_LEAST_OF_PROFILE = 0.7  # profiles hold what collectives reach, not data sheets
_LEAST_OF_OTHERS = {True: 0.85, False: 0.5}  # on a GPU; on a CPU, other work makes measurements vary


@dataclass(frozen=True)
class Survey:
    """Facts and measured speeds of all nodes of a run. Nodes are numbered from 0 in the order of their ranks."""

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]  # ranks of each node
    facts: tuple[Mapping[str, str], ...]
    on_gpu: bool
    speeds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # measurement → rank → value


def world_problems(survey: Survey, profile: Hardware | None) -> list[Problem]:
    """Return all problems, errors first: facts that differ between nodes, and nodes slower than others or a profile."""
    found = [*_shapes(survey), *_differences(survey), *_slow(survey)]
    if profile is not None:
        found += _below_profile(survey, profile)
    return sorted(found, key=lambda problem: ("error", "warning", "note").index(problem.level))


def _shapes(survey: Survey) -> Iterator[Problem]:
    usual = statistics.mode(map(len, survey.ranks))
    for name, ranks in zip(survey.names, survey.ranks, strict=True):
        if len(ranks) != usual:
            what = f"node {name} has {len(ranks)} processes, others {usual}"
            yield Problem("error", what, "start as many on each, one for each GPU (torchrun --nproc-per-node)")


_REMEDIES: tuple[tuple[tuple[str, ...], Level, str], ...] = (
    (("code",), "error", "bring the same version of megavlm to all nodes"),
    (
        ("python", "torch", "CUDA of torch", "NCCL", "megatron-core", "transformer-engine", "numpy", "transformers"),
        "error",
        "install the same on all nodes: one environment on shared storage, or one container image",
    ),
    (
        ("GPUs",),
        "error",
        "leave the node out (sbatch --exclude), or have its GPUs looked at: nvidia-smi, dmesg | grep -i xid",
    ),
    (("driver", "Linux"), "warning", "bring the nodes to one version"),
)


def _differences(survey: Survey) -> Iterator[Problem]:
    """Yield a problem for each value of a fact that differs from the most common value."""
    for fact in dict.fromkeys(key for facts in survey.facts for key in facts):
        values = [facts.get(fact, "not set") for facts in survey.facts]
        usual = statistics.mode(values)  # of two nodes that differ, the first counts as usual
        odd: dict[str, list[str]] = defaultdict(list)
        for name, value in zip(survey.names, values, strict=True):
            if value != usual:
                odd[value].append(name)
        for value, names in odd.items():
            level, remedy = next(
                ((level, remedy) for keys, level, remedy in _REMEDIES if fact in keys),
                ("warning", "set it alike on all nodes, in a profile of launch/profiles"),
            )
            yield Problem(level, f"{_nodes(names)}: {fact} is {value}, elsewhere {usual}", remedy)


def _slow(survey: Survey) -> Iterator[Problem]:
    """Yield a problem for each node with ranks below a share of the median speed (85 % on GPUs, 50 % on CPUs)."""
    for what, speeds in survey.speeds.items():
        usual = statistics.median_high(speeds.values())
        slow = {rank: speed for rank, speed in speeds.items() if speed < _LEAST_OF_OTHERS[survey.on_gpu] * usual}
        for name, ranks in zip(survey.names, survey.ranks, strict=True):
            if mine := [rank for rank in ranks if rank in slow]:
                which = f"rank{'s'[: len(mine) > 1]} {', '.join(map(str, mine))} on " if len(mine) < len(ranks) else ""
                share = min(slow[rank] for rank in mine) / usual
                yield Problem(
                    "warning",
                    f"{which}node {name}: {what} at {share:.0%} of the others' {_shown(what, usual)}",
                    "look at its clocks, other processes and links (nvidia-smi -q -d CLOCK,POWER,PERFORMANCE, top, "
                    "nvidia-smi topo -m, ibstat, ethtool), or leave the node out (sbatch --exclude)",
                )


def _promised(survey: Survey, profile: Hardware) -> dict[str, float]:
    """Return the bandwidth that a profile promises for each measurement, in bytes/s.

    Within a node it is the bandwidth of the node's links, between two nodes one device's share of the network. A ring
    through all ranks enters each node once and uses all network adapters, but is no faster than the links in a node.
    """
    near, far = profile.near.bandwidth, profile.far.bandwidth
    world = near if len(survey.ranks) == 1 else min(near, far * min(map(len, survey.ranks)))
    return {WITHIN: near, WORLD: world, EXCHANGE: far}


def _below_profile(survey: Survey, profile: Hardware) -> Iterator[Problem]:
    for what, promised in _promised(survey, profile).items():
        speeds = survey.speeds.get(what, {})
        least = min(speeds.values(), default=promised)
        if least < _LEAST_OF_PROFILE * promised:
            who = f"rank {next(rank for rank, speed in speeds.items() if speed == least)}"
            has = f"the profile {profile.name} has {_shown(what, promised)}"
            remedy = "NCCL_DEBUG=INFO says which network NCCL takes; a profile of launch/profiles sets it up"
            yield Problem("warning", f"{what}: {_shown(what, least)} ({who}), {has}", remedy)


def _nodes(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"node{'s'[: len(names) > 1]} {shown}"


def _shown(what: str, speed: float) -> str:
    return f"{speed / 1e9:.3g} GB/s" if what in (WITHIN, WORLD, EXCHANGE) else f"{speed:.3g}"


def rows(survey: Survey) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each line of the report on all nodes."""
    first = survey.facts[0]
    yield "nodes", f"{len(survey.names)}: {', '.join(survey.names[:8])}{' …' if len(survey.names) > 8 else ''}"
    yield "ranks", str(sum(map(len, survey.ranks)))
    yield from ((fact, first[fact]) for fact in ("torch", "NCCL", "driver", "GPUs") if fact in first)
    for what, speeds in survey.speeds.items():
        slowest, usual, fastest = min(speeds.values()), statistics.median(speeds.values()), max(speeds.values())
        shown = (_shown(what, each) for each in (usual, slowest, fastest))
        yield what, "{}, slowest {}, fastest {}".format(*shown)
