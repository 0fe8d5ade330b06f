"""Estimate the cost of a run on a cloud's machines, for `megavlm plan --machine`.

Prices come from `devices.toml`, each with its date and source; they are not today's prices.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace

from megavlm.config.messages import did_you_mean, plain
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.planner.devices import MACHINES, Machine, find_machine
from megavlm.planner.evaluator import Estimate
from megavlm.resilience.young_daly import LLAMA3_PER_GPU_HOUR, FailingJob

_DETECTION = 90.0  # seconds from a failure to the end of the attempt
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
    """Return the machine type that --machine names. Raises UserError for an unknown or partly used one."""
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
    """Return the number of machines with `gpus` GPUs in all. Raises UserError if a machine would be used in part."""
    if gpus % machine.gpus:
        raise UserError(f"--gpus {gpus} is no multiple of the {machine.gpus} GPUs of a {machine.name}, sold as a whole")
    return gpus // machine.gpus


def costs(options: argparse.Namespace, config: Config, best: Estimate, machine: Machine) -> Iterator[str]:
    """Yield lines with the hours, dollars and source of the price for the best layout of a resolved configuration."""
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
    # machines are paid for meanwhile. Preemptions of a machine are added to the failures of its GPUs.
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
