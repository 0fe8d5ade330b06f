"""Derive problems from what the nodes of a run told and measured: pure functions, one per subject.

What is slow is found by comparison: with the other nodes, and with a profile of the planner where one is given. With
two nodes there is only one pair, so that nothing but the profile tells that it is slow.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megavlm.planner.hardware import Hardware
from megavlm.programs.doctor.problems import Level, Problem

_MOST_OFFSET = 1.0  # seconds; events of a run are ordered by clocks
_LEAST_OF_PROFILE = 0.7  # profiles hold what collectives reach, not data sheets
_LEAST_OF_OTHERS = {True: 0.85, False: 0.5}  # on a GPU; a CPU's other work makes measurements differ
# What is measured.
WITHIN, WORLD, EXCHANGE = "all-reduce within nodes", "all-reduce of all ranks", "exchange between two nodes"


@dataclass(frozen=True)
class Bandwidth:
    """Of the slowest rank that took part, in bytes/s; `nodes` are numbers."""

    what: str
    nodes: tuple[int, ...]
    value: float
    rank: int  # which was slowest


@dataclass(frozen=True)
class Survey:
    """All that was told and measured. Nodes are numbered from 0 in the order of their ranks."""

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]  # of each node
    facts: tuple[Mapping[str, str], ...]
    on_gpu: bool
    clocks: tuple[float, ...] = ()  # seconds ahead of the first node's
    rates: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # rank → what → value
    bandwidths: tuple[Bandwidth, ...] = ()

    def node_of(self, rank: int) -> str:
        return next(name for name, ranks in zip(self.names, self.ranks, strict=True) if rank in ranks)


def world_problems(survey: Survey, profile: Hardware | None) -> list[Problem]:
    """Return all problems, errors first."""
    found = [*_shapes(survey), *_differences(survey), *_clocks(survey), *_rates(survey)]
    slow = list(_slow_nodes(survey))
    found += [*(problem for problem, _ in slow), *_slow_pairs(survey, {node for _, node in slow})]
    if profile is not None:
        found += _below_profile(survey, profile)
    return sorted(found, key=lambda problem: ("error", "warning", "note").index(problem.level))


def _shapes(survey: Survey) -> Iterator[Problem]:
    usual = _majority([str(len(ranks)) for ranks in survey.ranks])
    for name, ranks in zip(survey.names, survey.ranks, strict=True):
        if str(len(ranks)) != usual:
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
    (("adapters",), "warning", "leave the node out (sbatch --exclude), or look at the port: ibstat, ethtool, ip link"),
    (("driver", "Linux"), "warning", "bring the nodes to one version"),
)


def _differences(survey: Survey) -> Iterator[Problem]:
    """Yield a line for each fact and value of a minority of nodes."""
    for fact in dict.fromkeys(key for facts in survey.facts for key in facts):
        values = [facts.get(fact, "not set") for facts in survey.facts]
        usual = _majority(values)
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


def _clocks(survey: Survey) -> Iterator[Problem]:
    for name, ahead in zip(survey.names, survey.clocks, strict=False):
        if abs(ahead) > _MOST_OFFSET:
            way = "ahead of" if ahead > 0 else "behind"
            what = f"node {name}: clock is {abs(ahead):.1f} s {way} that of {survey.names[0]}"
            yield Problem("warning", what, "chronyc makestep  # and let chrony or NTP run on the node")


def _rates(survey: Survey) -> Iterator[Problem]:
    """Yield a line for each device that computes or copies slower than the median one."""
    least = _LEAST_OF_OTHERS[survey.on_gpu]
    for what in dict.fromkeys(key for rates in survey.rates.values() for key in rates):
        values = {rank: rates[what] for rank, rates in survey.rates.items() if what in rates}
        usual = statistics.median_high(values.values())
        for rank, value in values.items():
            if value < least * usual:
                told = f"rank {rank} on node {survey.node_of(rank)}: {what} at {value / usual:.0%} of the others' rate"
                yield Problem("warning", told, "nvidia-smi -q -d CLOCK,POWER,PERFORMANCE; other processes (top)")


def _exchanges(survey: Survey) -> dict[tuple[int, ...], Bandwidth]:
    return {each.nodes: each for each in survey.bandwidths if each.what == EXCHANGE}


def _usual_by_node(survey: Survey) -> dict[int, float]:
    """Return the median bandwidth of each node's exchanges, the higher one of two: a slow partner is not its fault."""
    by_node = defaultdict(list)
    for pair, each in _exchanges(survey).items():
        for node in pair:
            by_node[node].append(each.value)
    return {node: statistics.median_high(values) for node, values in by_node.items()}


def _slow_nodes(survey: Survey) -> Iterator[tuple[Problem, int]]:
    """Yield nodes whose exchanges with most others are slow, and those whose own collectives are."""
    least = _LEAST_OF_OTHERS[survey.on_gpu]
    usual = _usual_by_node(survey)
    if len(usual) > 2:
        typical = statistics.median_high(usual.values())
        for node, value in sorted(usual.items()):
            if value < least * typical:
                what = (
                    f"node {survey.names[node]}: exchanges with other nodes at {_gb(value)}, others' at {_gb(typical)}"
                )
                yield (
                    Problem("warning", what, "leave the node out (sbatch --exclude); ibstat, ethtool, top on it"),
                    node,
                )
    inner = {each.nodes[0]: each.value for each in survey.bandwidths if each.what == WITHIN}
    typical = statistics.median_high(inner.values()) if inner else 0.0
    for node, value in sorted(inner.items()):
        if value < least * typical:
            what = f"node {survey.names[node]}: {WITHIN} at {_gb(value)}, others' at {_gb(typical)}"
            remedy = "leave the node out (sbatch --exclude); nvidia-smi topo -m, nvlink -s"
            yield Problem("warning", what, remedy), node


def _slow_pairs(survey: Survey, slow_nodes: set[int]) -> Iterator[Problem]:
    """Yield slow links between nodes that are not slow as such."""
    exchanges, usual = _exchanges(survey), _usual_by_node(survey)
    if len(usual) < 3:
        return
    typical = statistics.median_high(usual.values())
    for (a, b), each in sorted(exchanges.items()):
        if each.value < _LEAST_OF_OTHERS[survey.on_gpu] * typical and not {a, b} & slow_nodes:
            what = (
                f"link {survey.names[a]} – {survey.names[b]}: {_gb(each.value)}, others' {_gb(typical)}; "
                f"slowest at rank {each.rank}"
            )
            yield Problem(
                "warning", what, "a cable or switch between them: let neither pair of ranks use it, or leave one out"
            )


def expected(what: str, survey: Survey, profile: Hardware) -> float:
    """Return the bandwidth that a profile promises.

    Within a node that of its links, between two nodes the share of one device in the network. A ring through all ranks
    enters each node once, over all adapters in turn, but is no faster than its links.
    """
    if what == WITHIN or len(survey.ranks) == 1:
        return profile.near.bandwidth
    if what == WORLD:
        return min(profile.near.bandwidth, profile.far.bandwidth * min(map(len, survey.ranks)))
    return profile.far.bandwidth


def _below_profile(survey: Survey, profile: Hardware) -> Iterator[Problem]:
    """Yield a line for each kind of measurement whose slowest one is below the profile's."""
    for what in dict.fromkeys(each.what for each in survey.bandwidths):
        same = [each for each in survey.bandwidths if each.what == what]
        slowest = min(same, key=lambda each: each.value)
        promised = expected(what, survey, profile)
        if slowest.value < _LEAST_OF_PROFILE * promised:
            where = _nodes([survey.names[node] for node in slowest.nodes])
            line = f"{what}: {_gb(slowest.value)} ({where}), the profile {profile.name} has {_gb(promised)}"
            remedy = "NCCL_DEBUG=INFO says which network NCCL takes; a profile of launch/profiles sets it up"
            yield Problem("warning", line, remedy)


def _majority(values: Sequence[str]) -> str:
    """Return the most frequent value; of several the first, so that the first node is believed where two differ."""
    return max(dict.fromkeys(values), key=values.count)


def _nodes(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"node{'s'[: len(names) > 1]} {shown}"


def _gb(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"


def rows(survey: Survey, profile: Hardware | None) -> Iterator[tuple[str, str]]:
    """Yield name and value of each line of the report."""
    first = survey.facts[0]
    yield "nodes", f"{len(survey.names)}: {', '.join(survey.names[:8])}{' …' if len(survey.names) > 8 else ''}"
    yield "ranks", str(sum(map(len, survey.ranks)))
    for fact in ("torch", "NCCL", "driver", "GPUs", "adapters"):
        if fact in first:
            yield fact, first[fact]
    for what in dict.fromkeys(key for rates in survey.rates.values() for key in rates):
        values = [rates[what] for rates in survey.rates.values()]
        yield what, f"{statistics.median(values):.3g}, slowest {min(values):.3g}, fastest {max(values):.3g}"
    for what in dict.fromkeys(each.what for each in survey.bandwidths):
        values = [each.value / 1e9 for each in survey.bandwidths if each.what == what]
        promised = "" if profile is None else f", the profile has {expected(what, survey, profile) / 1e9:.3g}"
        spread = f"{values[0]:.3g}" if len(values) == 1 else f"{min(values):.3g} to {max(values):.3g} in {len(values)}"
        yield what, f"{spread} GB/s per rank{promised}"
