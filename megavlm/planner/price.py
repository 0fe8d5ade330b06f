"""What a run would cost on a cloud's machines: hours and dollars, on demand and on spot machines that are preempted.

Prices are read from `prices.tsv`, each with its date and source: they are of that date, not of today.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megavlm.errors import UserError
from megavlm.planner.machines import Machine
from megavlm.resilience.young_daly import LLAMA3_PER_GPU_HOUR, FailingJob

_FILE = Path(__file__).with_name("prices.tsv")


@dataclass(frozen=True)
class Price:
    """Dollars per machine and hour; None where a machine is not sold in this way, or the price is not known."""

    on_demand: float | None
    spot: float | None
    of: str  # where, when and by whom it was stated


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


def price_of(machine: Machine) -> Price:
    """Return the price in the table; one without amounts if it has none of this machine."""
    for row in rows():
        if row["machine"] == machine.name:
            on_demand, spot = (float(row[way]) if row[way] else None for way in ("on_demand", "spot"))
            return Price(on_demand, spot, f"{row['region']}, {row['date']}, {row['source']}")
    return Price(None, None, "no price is known")


def rows() -> list[dict[str, str]]:
    """Return the table of prices, a line each."""
    lines = [line for line in _FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines, delimiter="\t"))


def machines_for(gpus: int, machine: Machine) -> int:
    """Return how many machines have so many GPUs. Raises UserError if one would not be used whole."""
    if gpus % machine.gpus:
        raise UserError(f"--gpus {gpus} is no multiple of the {machine.gpus} GPUs of a {machine.name}, sold as a whole")
    return gpus // machine.gpus


def bills(work: Work, machine: Machine, machines: int, price: Price, interruptions: Interruptions) -> Iterator[Bill]:
    """Yield what the work costs on demand and, where the rate of preemptions is given, on spot machines.

    Saves are as far apart as Young and Daly recommend. A job that loses one machine waits for another (`restart`), and
    all its machines are paid for meanwhile.
    """
    for way, each in (("on demand", price.on_demand), ("spot", price.spot)):
        if each is None or (way == "spot" and interruptions.preemptions_per_day is None):
            continue
        job = interruptions.job(machine, machines, spot=way == "spot")
        goodput = job.goodput(job.best_interval)
        per_hour = each * machines
        seconds = work.step_seconds / goodput if goodput else float("inf")
        hours = None if work.steps is None else work.steps * seconds / 3600
        per_billion = per_hour * seconds / 3600 / work.tokens_per_step * 1e9
        yield Bill(way, per_hour, goodput, job.best_interval, hours, per_billion)


def report(work: Work, machine: Machine, machines: int, price: Price, interruptions: Interruptions) -> Iterator[str]:
    """Yield the lines on hours and dollars, with where the price is from."""
    gpu = f"{machines} × {machine.name} ({machine.gpus} × {machine.gpu} each)"
    yield f"cost on {gpu}; not today's prices, but of: {price.of}"
    if work.steps is not None:
        yield f"  {work.steps:,} steps, {work.steps * work.tokens_per_step / 1e9:,.3g} billion tokens"
    found = list(bills(work, machine, machines, price, interruptions))
    for bill in found:
        total = "" if bill.hours is None else f"{bill.hours:,.1f} h, ${bill.dollars:,.0f}, "
        yield (
            f"  {bill.way}: {total}${bill.per_billion_tokens:,.0f} per billion tokens at ${bill.per_hour:,.2f} an "
            f"hour; goodput {bill.goodput:.1%} with a save every {bill.save_every:,.0f} s"
        )
    if price.on_demand is None:
        yield "  on demand: no price; give one by --price-per-hour"
    if interruptions.preemptions_per_day is None:
        yield "  spot: say how often a machine is taken away (--preemptions-per-day), which no table knows"
    elif price.spot is None:
        yield "  spot: no price; give one by --spot-price-per-hour"
