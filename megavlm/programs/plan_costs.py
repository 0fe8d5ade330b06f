"""What a run would cost on a cloud's machines, for `megavlm plan`: hours and dollars, on demand and on spot machines.

Prices are those of `devices.toml`, each with its date and source: they are of that date, not of today.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megavlm.config.messages import did_you_mean, plain
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.planner.devices import MACHINES, Machine, find_machine
from megavlm.planner.search import SearchResult
from megavlm.resilience.young_daly import LLAMA3_PER_GPU_HOUR, FailingJob

# Options that are about the price of a machine and have no default.
_COSTS = ("train_iters", "samples", "price_per_hour", "spot_price_per_hour", "preemptions_per_day")


def add_cost_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--train-iters", type=int, metavar="N", help="Steps of the run; default: FILE.yaml's.")
    group.add_argument("--samples", type=int, metavar="N", help="Samples to train on, instead of --train-iters.")
    group.add_argument(
        "--price-per-hour", type=float, metavar="DOLLARS", help="Price of a machine; default: a dated one of a table."
    )
    group.add_argument("--spot-price-per-hour", type=float, metavar="DOLLARS", help="The same of a spot machine.")
    group.add_argument(
        "--preemptions-per-day", type=float, metavar="X", help="How often a spot machine is taken away; no default."
    )
    group.add_argument(
        "--restart-seconds", type=float, default=300.0, metavar="S", help="Time of a restart; default: 300."
    )
    group.add_argument(
        "--stall-seconds", type=float, default=2.0, metavar="S", help="Time that a save stops training; default: 2."
    )


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
    if options.samples is not None and options.train_iters is not None:
        raise UserError("--samples and --train-iters say the same: give one of them")
    return machine


def costs(options: argparse.Namespace, config: Config, outcome: SearchResult, machine: Machine) -> list[str]:
    """Return the lines on hours and dollars of the best layout of a resolved configuration."""
    best = outcome.best[0]
    steps = options.train_iters
    if options.samples is not None:
        steps = math.ceil(options.samples / config.train.global_batch_size)
    elif steps is None and options.config is not None:
        steps = config.train.train_iters
    given = (("on_demand", options.price_per_hour), ("spot", options.spot_price_per_hour))
    if changes := {way: value for way, value in given if value is not None}:
        priced = f"{' and '.join(changes).replace('_', ' ')} as given, else {machine.priced}"
        machine = replace(machine, **changes, priced=priced)
    work = Work(best.step.seconds, best.tokens_per_second * best.step.seconds, steps)
    often = Interruptions(
        stall=options.stall_seconds, restart=options.restart_seconds, preemptions_per_day=options.preemptions_per_day
    )
    return list(report(work, machine, machines_for(options.gpus, machine), often))


@dataclass(frozen=True)
class Work:
    """What is to be trained."""

    step_seconds: float
    tokens_per_step: float
    steps: int | None  # None: not known, so that only the cost of a token is


@dataclass(frozen=True)
class Interruptions:
    """What a restart and a save cost, in seconds, and how often a spot machine is taken away."""

    stall: float = 2.0
    restart: float = 300.0
    detection: float = 90.0
    preemptions_per_day: float | None = None  # of one machine; None: not known

    def job(self, machine: Machine, machines: int, *, spot: bool) -> FailingJob:
        """Return the job with the failures of its GPUs, and on spot machines with their preemptions."""
        preempted = (self.preemptions_per_day or 0.0) / 24 / machine.gpus if spot else 0.0
        rate = LLAMA3_PER_GPU_HOUR + preempted
        return FailingJob(machines * machine.gpus, rate, self.stall, self.restart, self.detection)


@dataclass(frozen=True)
class Bill:
    """What a way to pay for machines comes to."""

    way: str
    per_hour: float  # dollars of all machines
    goodput: float
    save_every: float  # seconds of training
    hours: float | None  # with failures and restarts; None where the number of steps is not known
    per_billion_tokens: float

    @property
    def dollars(self) -> float | None:
        return None if self.hours is None else self.hours * self.per_hour


def machines_for(gpus: int, machine: Machine) -> int:
    """Return how many machines have so many GPUs. Raises UserError if one would not be used whole."""
    if gpus % machine.gpus:
        raise UserError(f"--gpus {gpus} is no multiple of the {machine.gpus} GPUs of a {machine.name}, sold as a whole")
    return gpus // machine.gpus


def bills(work: Work, machine: Machine, machines: int, interruptions: Interruptions) -> Iterator[Bill]:
    """Yield what the work costs on demand and, where the rate of preemptions is given, on spot machines.

    Saves are as far apart as Young and Daly recommend. A job that loses one machine waits for another (`restart`), and
    all its machines are paid for meanwhile.
    """
    for way, each in (("on demand", machine.on_demand), ("spot", machine.spot)):
        if each is None or (way == "spot" and interruptions.preemptions_per_day is None):
            continue
        job = interruptions.job(machine, machines, spot=way == "spot")
        goodput = job.goodput(job.best_interval)
        per_hour = each * machines
        seconds = work.step_seconds / goodput if goodput else float("inf")
        hours = None if work.steps is None else work.steps * seconds / 3600
        per_billion = per_hour * seconds / 3600 / work.tokens_per_step * 1e9
        yield Bill(way, per_hour, goodput, job.best_interval, hours, per_billion)


def report(work: Work, machine: Machine, machines: int, interruptions: Interruptions) -> Iterator[str]:
    """Yield the lines on hours and dollars, with where the price is from."""
    gpu = f"{machines} × {machine.name} ({machine.gpus} × {machine.gpu} each)"
    yield f"cost on {gpu}; not today's prices, but of: {machine.priced}"
    if work.steps is not None:
        yield f"  {work.steps:,} steps, {work.steps * work.tokens_per_step / 1e9:,.3g} billion tokens"
    found = list(bills(work, machine, machines, interruptions))
    for bill in found:
        total = "" if bill.hours is None else f"{bill.hours:,.1f} h, ${bill.dollars:,.0f}, "
        yield (
            f"  {bill.way}: {total}${bill.per_billion_tokens:,.0f} per billion tokens at ${bill.per_hour:,.2f} an "
            f"hour; goodput {bill.goodput:.1%} with a save every {bill.save_every:,.0f} s"
        )
    if machine.on_demand is None:
        yield "  on demand: no price; give one by --price-per-hour"
    if interruptions.preemptions_per_day is None:
        yield "  spot: say how often a machine is taken away (--preemptions-per-day), which no table knows"
    elif machine.spot is None:
        yield "  spot: no price; give one by --spot-price-per-hour"
