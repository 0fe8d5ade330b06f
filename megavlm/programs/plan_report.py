"""The report of `megavlm plan`: layouts, why others fail, where the best one's memory and time go, what a run costs.

Prices are those of `devices.toml`, each with its date and source: they are of that date, not of today.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megavlm.config.messages import aligned, did_you_mean, plain
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.planner.devices import MACHINES, Machine, find_machine
from megavlm.planner.evaluator import GIB, Estimate, Rejected
from megavlm.planner.host_memory import host_line
from megavlm.planner.memory import table as memory_table
from megavlm.planner.search import SearchResult
from megavlm.resilience.young_daly import LLAMA3_PER_GPU_HOUR, FailingJob

ERROR = 0.136  # of predicted step times, in the median of 16 configurations: docs/reports/measured.md
_DETECTION = 90.0  # seconds from a failure to the end of the attempt
_NUMBER = re.compile(r"\d[\d.,]*")
_HEADER = ("layout", "step s", "tokens/s", "MFU", "bubble", "weights", "gradients", "optimizer", "activations", "other",
           "GiB in all")  # fmt: skip


def report(outcome: SearchResult) -> str:
    """Return the whole answer of a search, as text; all reasons are told where no layout can run."""
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
        ]
    )


def _fastest_of_each(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the first of those that have the same degrees and the same placement."""
    found: dict[tuple[object, ...], Estimate] = {}
    for each in estimates:
        layout = each.candidate
        found.setdefault((layout.dims, layout.placement, layout.vision_tp), each)
    return list(found.values())


def _experts(outcome: SearchResult) -> list[str]:
    """Return a line on what was assumed of experts that ranks share, if they do in any of the best layouts."""
    if all(each.candidate.dims.ep == 1 for each in outcome.best):
        return []
    imbalance = outcome.evaluator.imbalance
    return [f"the busiest rank of --ep is taken to compute {imbalance:g} × the mean (--expert-imbalance)"]


def _offloads(outcome: SearchResult) -> list[str]:
    """Return a line on the host memory that the best layout needs; none where it offloads nothing."""
    best = outcome.best[0]
    hosts, world = best.step.host, best.candidate.dims.world
    return [host_line(hosts, world, outcome.evaluator.hardware)] if hosts else []


def layouts(estimates: Sequence[Estimate]) -> str:
    """One line per layout; memory is that of the fullest pipeline rank."""
    rows = [_HEADER, *(_row(each) for each in estimates)]
    return "\n".join(aligned(rows, left=(0,)))


def ties(estimates: Sequence[Estimate]) -> list[str]:
    """Return a line that says which layouts the planner cannot tell from the first, if there are any."""
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
    """Return each reason once, with how many layouts it concerns and one of them. Reasons that differ in numbers alone
    are one.
    """
    alike: dict[str, list[Rejected]] = defaultdict(list)
    for each in rejected:
        alike[_NUMBER.sub("", each.reason)].append(each)
    groups = sorted(alike.values(), key=len, reverse=True)
    return [f"  {len(group):5d} × {group[0].reason} (as {group[0].candidate.label})" for group in groups]


# Options that are about the price of a machine and have no default.
_COSTS = ("train_iters", "samples", "price_per_hour", "spot_price_per_hour", "preemptions_per_day")


def add_cost_options(group: argparse._ArgumentGroup) -> None:
    length = group.add_mutually_exclusive_group()
    length.add_argument("--train-iters", type=int, metavar="N", help="Steps of the run; default: FILE.yaml's.")
    length.add_argument("--samples", type=int, metavar="N", help="Samples to train on, instead of --train-iters.")
    group.add_argument(
        "--price-per-hour", type=float, metavar="DOLLARS", help="Price of a machine; default: a dated one of a table."
    )
    group.add_argument("--spot-price-per-hour", type=float, metavar="DOLLARS", help="The same of a spot machine.")
    group.add_argument(
        "--preemptions-per-day", type=float, metavar="X", help="How often a spot machine is taken away; no default."
    )
    group.add_argument("--restart-seconds", type=float, default=300.0, metavar="S", help="Time of a restart.")
    group.add_argument("--stall-seconds", type=float, default=2.0, metavar="S", help="Time that a save stops training.")


def machine_of(options: argparse.Namespace) -> Machine | None:
    """Return the machine type that --machine names. Raises UserError for one that is not known, or not used whole."""
    if options.machine is None:
        given = [name for name in _COSTS if getattr(options, name) is not None]
        if given:
            raise UserError(f"--{given[0].replace('_', '-')} needs --machine, whose price it is about")
        return None
    machine = find_machine(options.machine)
    if machine is None:
        hint = did_you_mean(options.machine, MACHINES) or f": choose one of {', '.join(MACHINES)}"
        raise UserError(f"--machine {plain(options.machine)} is not known{hint}")
    machines_for(options.gpus, machine)
    for name in (*_COSTS, "restart_seconds", "stall_seconds"):
        if (value := getattr(options, name)) is not None and not 0 <= value < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {value} must be a number from 0")
    return machine


def machines_for(gpus: int, machine: Machine) -> int:
    """Return how many machines have so many GPUs. Raises UserError if one would not be used whole."""
    if gpus % machine.gpus:
        raise UserError(f"--gpus {gpus} is no multiple of the {machine.gpus} GPUs of a {machine.name}, sold as a whole")
    return gpus // machine.gpus


def costs(options: argparse.Namespace, config: Config, best: Estimate, machine: Machine) -> Iterator[str]:
    """Yield the lines on hours and dollars of the best layout of a resolved configuration, with the price's source."""
    steps = options.train_iters
    if options.samples is not None:
        steps = math.ceil(options.samples / config.train.global_batch_size)
    elif steps is None and options.config is not None:
        steps = config.train.train_iters
    given = {"on_demand": options.price_per_hour, "spot": options.spot_price_per_hour}
    if changes := {way: value for way, value in given.items() if value is not None}:
        priced = f"{' and '.join(changes).replace('_', ' ')} as given, else {machine.priced}"
        machine = replace(machine, **changes, priced=priced)
    machines, tokens = machines_for(options.gpus, machine), best.tokens_per_second * best.step.seconds
    yield (
        f"cost on {machines} × {machine.name} ({machine.gpus} × {machine.gpu} each); not today's prices, but of: "
        f"{machine.priced}"
    )
    if steps is not None:
        yield f"  {steps:,} steps, {steps * tokens / 1e9:,.3g} billion tokens"
    # Saves are as far apart as Young and Daly recommend. A job that loses one machine waits for another, and all its
    # machines are paid for meanwhile. Preemptions of a machine come beside the failures of its GPUs.
    for way, price, preemptions in (
        ("on demand", machine.on_demand, 0.0),
        ("spot", machine.spot, options.preemptions_per_day),
    ):
        if preemptions is None:
            yield f"  {way}: say how often a machine is taken away (--preemptions-per-day), which no table knows"
            continue
        if price is None:
            yield f"  {way}: no price; give one by --{'spot-' * (way == 'spot')}price-per-hour"
            continue
        rate = LLAMA3_PER_GPU_HOUR + preemptions / 24 / machine.gpus
        job = FailingJob(options.gpus, rate, options.stall_seconds, options.restart_seconds, _DETECTION)
        goodput, per_hour = job.goodput(job.best_interval), price * machines
        hours = best.step.seconds / goodput / 3600 if goodput else math.inf
        total = "" if steps is None else f"{steps * hours:,.1f} h, ${steps * hours * per_hour:,.0f}, "
        yield (
            f"  {way}: {total}${1e9 * hours * per_hour / tokens:,.0f} per billion tokens at ${per_hour:,.2f} an hour; "
            f"goodput {goodput:.1%} with a save every {job.best_interval:,.0f} s"
        )
