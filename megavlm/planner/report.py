"""Report of a layout search as text: the fastest layouts, why others cannot run, and the best one's memory and time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from megavlm.arch.scenario import expert_imbalance
from megavlm.config.messages import aligned
from megavlm.planner.advice import ERROR, explanation
from megavlm.planner.evaluator import GIB, Estimate, Rejected
from megavlm.planner.host_memory import host_line
from megavlm.planner.memory import table as memory_table
from megavlm.planner.search import SearchResult

_NUMBER = re.compile(r"\d[\d.,]*")
_HEADER = ("layout", "step s", "tokens/s", "MFU", "bubble", "weights", "gradients", "optimizer", "activations", "other",
           "GiB in all")  # fmt: skip


def report(outcome: SearchResult, *, explain: bool = False) -> str:
    """Return the report of a search as text, which may `explain` the best layout beside the one that guides advise; if
    no layout can run, the reasons why.
    """
    if not outcome.best:
        return "\n".join(["no layout can run", *reasons(outcome.rejected)])
    best = outcome.best[0]
    listed = _fastest_of_each(outcome.best)
    alike = len(outcome.best) - len(listed)
    step = best.step
    parts = (("pipeline", step.pipeline), ("encoder", step.encoder), ("gradients", step.gradients))
    shares = ", ".join(f"{name} {value:.3f}" for name, value in (*parts, ("optimizer", step.optimizer)) if value)
    proof = "no cut is faster" if best.partition.exact else f"bound {best.partition.bound:.3f} s"
    return "\n".join(
        [
            layouts(listed),
            *([f"{alike} more differ from these in micro-batch, recomputation or memory alone"] if alike else []),
            *ties(listed),
            *_experts(outcome),
            "",
            f"best: {best.candidate.label}",
            f"  cuts {' '.join(map(str, best.partition.cuts)) or 'none'} ({proof}); seconds: {shares}",
            memory_table(step.memory),
            *_offloads(outcome),
            "",
            f"{outcome.tried} layouts, {outcome.simulated} simulated, {len(outcome.rejected)} cannot run"
            + (f"; most often {reasons(outcome.rejected)[0].strip()}" if outcome.rejected else ""),
            *(["", explanation(outcome)] if explain else []),
        ]
    )


def _fastest_of_each(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the first estimate for each combination of degrees and placement."""
    found: dict[tuple[object, ...], Estimate] = {}
    for each in estimates:
        layout = each.candidate
        found.setdefault((layout.dims, layout.placement, layout.vision_tp), each)
    return list(found.values())


def _experts(outcome: SearchResult) -> list[str]:
    """Return a line on the assumed imbalance of experts, if any of the best layouts uses expert parallelism."""
    if all(each.candidate.dims.ep == 1 for each in outcome.best):
        return []
    imbalance = expert_imbalance(outcome.evaluator.config)
    return [f"the busiest rank of --ep is taken to compute {imbalance:g} × the mean"]


def _offloads(outcome: SearchResult) -> list[str]:
    """Return a line on the host memory that the best layout needs; no line if it offloads nothing."""
    best = outcome.best[0]
    hosts, world = best.step.host, best.candidate.dims.world
    return [host_line(hosts, world, outcome.evaluator.hardware)] if hosts else []


def layouts(estimates: Sequence[Estimate]) -> str:
    """Return a table with one line per layout; memory is that of the fullest pipeline rank."""
    rows = [_HEADER, *(_row(each) for each in estimates)]
    return "\n".join(aligned(rows, left=(0,)))


def ties(estimates: Sequence[Estimate]) -> list[str]:
    """Return a line on how many layouts are as fast as the first within the planner's error, if there are others."""
    near = sum(each.step.seconds <= (1 + ERROR) * estimates[0].step.seconds for each in estimates)
    if near == 1:
        return []
    return [
        f"the first {near} are as good as equal: they differ by less than the planner's own error ({ERROR:.1%} in the "
        "median). Measure them, or take the one that you know best"
    ]


def _row(estimate: Estimate) -> tuple[str, ...]:
    step = estimate.step
    fullest = max(step.memory, key=lambda memory: memory.total)
    named = (fullest.weights, fullest.gradients, fullest.optimizer, fullest.activations)
    parts = (*named, fullest.total - sum(named), fullest.total)
    return (
        estimate.candidate.label,
        f"{step.seconds:.3f}",
        f"{estimate.tokens_per_second:,.0f}",
        "–" if estimate.mfu is None else f"{estimate.mfu:.1%}",
        f"{step.bubble:.1%}",
        *(f"{value / GIB:.2f}" for value in parts),
    )


def reasons(rejected: Sequence[Rejected]) -> list[str]:
    """Return a line per reason, with the number of layouts and an example. Reasons that differ only in numbers count as
    one.
    """
    alike: dict[str, list[Rejected]] = defaultdict(list)
    for each in rejected:
        alike[_NUMBER.sub("", each.reason)].append(each)
    groups = sorted(alike.values(), key=len, reverse=True)
    return [f"  {len(group):5d} × {group[0].reason} (as {group[0].candidate.label})" for group in groups]
