"""The options of `megavlm plan` on what a run costs, and the lines that answer them."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from megavlm.config.messages import did_you_mean, plain
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.planner.machines import MACHINES, Machine, find_machine
from megavlm.planner.price import Interruptions, Work, machines_for, price_of, report
from megavlm.planner.search import SearchResult

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
    price = price_of(machine)
    given = (("on_demand", options.price_per_hour), ("spot", options.spot_price_per_hour))
    if changes := {way: value for way, value in given if value is not None}:
        price = replace(price, **changes, of=f"{' and '.join(changes).replace('_', ' ')} as given, else {price.of}")
    work = Work(best.step.seconds, best.tokens_per_second * best.step.seconds, steps)
    often = Interruptions(
        stall=options.stall_seconds, restart=options.restart_seconds, preemptions_per_day=options.preemptions_per_day
    )
    return list(report(work, machine, machines_for(options.gpus, machine), price, often))
