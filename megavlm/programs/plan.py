"""Find the fastest layout: `megavlm plan --model qwen2_5_vl_7b --gpus 64 --gpu h100 --images 6x1024`.

Options of a run (`--seq-length`, `--gbs`, `--freeze`, `--datasets`, …) describe the run to plan for. With --machine,
the report ends with what the run costs on a cloud's machines, at prices of `planner/devices.toml`. Each has its date
and source; they are not today's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megavlm.command_line.commands import Parser, count, reported
from megavlm.command_line.configuration import with_model, with_vocabulary
from megavlm.command_line.parsing import parse, typed_options
from megavlm.config.messages import did_you_mean, plain, several
from megavlm.config.schema import Config, DataConfig
from megavlm.errors import UserError
from megavlm.families import PUBLISHED, published_model
from megavlm.files import write_out
from megavlm.planner.candidates import Space
from megavlm.planner.evaluator import Estimate
from megavlm.planner.hardware import MACHINES, PROFILES, Machine, find_machine, profile
from megavlm.planner.report import report
from megavlm.planner.search import search
from megavlm.resilience.young_daly import LLAMA3_PER_GPU_HOUR, FailingJob
from megavlm.rules.extensions import without_extensions
from megavlm.rules.load import to_yaml

VOCABULARY = 256  # tokens, for a run on synthetic samples that does not set its vocabulary size
SYNTHETIC = ("kind", "images_per_sample", "image_sizes", "imageless_share", "imageless_samples", "answer_share")
LEAST_BATCH = 128  # sequences: the batch of published fine-tunes, as LLaVA's


@reported("plan")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 1 no layout fits, 2 an argument is wrong (reported in one line)."""
    return plan(options_of(argv))


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; the options of the run are kept as a list in `run`."""
    given, rest = _parser().parse_known_args(without_extensions(argv))
    given.run = rest
    return given


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Rank the layouts of a model on a number of devices.",
        epilog="All flags of a run are accepted as well, as --seq-length 8192 --gbs 256 --datasets train.jsonl. "
        "Degrees that are given, as --tp 8, micro-batch, recomputation, placement and sharding are not varied.",
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help=f"Plan for a published model: {', '.join(PUBLISHED)}.")
    what.add_argument("--config", metavar="FILE.yaml", help="Plan for the configuration of a run.")
    what.add_argument("--hf", metavar="DIR", help="Plan for a Hugging Face folder; only config.json is read.")
    parser.add_argument("--gpus", type=count, required=True, metavar="N", help="Number of GPUs.")
    device = parser.add_mutually_exclusive_group()
    device.add_argument(
        "--gpu",
        "--profile",
        dest="gpu",
        help=f"Device: {', '.join(PROFILES)}, or a JSON file from megavlm calibrate; default: h100.",
    )
    device.add_argument(
        "--machine",
        metavar="TYPE",
        help="Plan for a cloud's machines instead of --gpu, with their network, and say what the run costs on them: "
        f"{', '.join(MACHINES)}.",
    )
    device.add_argument(
        "--stage-gpus",
        nargs="+",
        default=(),
        metavar="GPU",
        help="GPUs of several types, as many of each: that of the first pipeline stages, of the next as many, …",
    )
    parser.add_argument("--images", metavar="COUNTxSIDE", help="Images per sample and their side in pixels: 6x1024.")
    parser.add_argument("--no-offload", action="store_true", help="Exclude layouts that fit only with --offload.")
    parser.add_argument("--top", type=count, default=10, metavar="N", help="Number of layouts to rank.")
    parser.add_argument("--out", type=Path, metavar="FILE.yaml", help="Write the configuration of the best layout.")
    parser.add_argument("--explain", action="store_true", help="Say why it is not the layout that guides advise.")
    add_cost_options(parser.add_argument_group("cost, with --machine"))
    return parser


def plan(options: argparse.Namespace) -> int:
    """Search the layouts, write the best configuration, and print a report; return 1 if no layout fits, else 0.

    The report is printed last, because its reader may stop early.
    """
    given = configuration(options)
    config, unknown = with_vocabulary(given, otherwise=VOCABULARY)
    machine = machine_of(options)
    name = options.gpu or "h100" if machine is None else machine.name
    stages = [profile(each) for each in options.stage_gpus]
    # Work of all stages together ends when the slowest GPU has done it.
    hardware = min(stages, key=lambda each: each.forward.matmul, default=None) or profile(name)
    hardware = replace(hardware, memory=max([hardware.memory, *(each.memory for each in stages)]))
    space, typed = Space(offload=()) if options.no_offload else None, typed_options(options.run)
    outcome = search(config, options.gpus, hardware, space=space, typed=typed, top=options.top, stages=stages)
    if outcome.best and options.out is not None:
        write_out("--out", options.out, to_yaml(to_train(outcome.config(given), options)))
        print(f"wrote {options.out}")
    batch, length = config.train.global_batch_size, config.train.seq_length
    print(f"a step has {several(batch, 'sequence')} (--gbs) of {length:,} tokens, {batch * length:,} in all")
    if unknown:
        print(f"a vocabulary of {VOCABULARY} tokens is assumed: model.language.vocab_size is not set, and {unknown}")
    print(report(outcome, explain=options.explain))
    if outcome.best and machine is not None:
        print("", *costs(options, config, outcome.best[0], machine), sep="\n")
    return 0 if outcome.best else 1


def to_train(config: Config, options: argparse.Namespace) -> Config:
    """Return the configuration to write, with the number of GPUs and their type.

    Unless --config was given, options of synthetic samples, which stood for the user's data, have their defaults.
    """
    usual = DataConfig()
    data = replace(config.data, **{name: getattr(usual, name) for name in SYNTHETIC})
    config = replace(config, run=replace(config.run, world_size=options.gpus))
    device = options.machine or options.gpu or "h100"  # a dry run and a launch ask whether it has the memory
    if options.stage_gpus or Path(device).is_file():
        device = config.placement.hardware
    config = replace(config, placement=replace(config.placement, plan="manual", hardware=device))
    return config if options.config is not None else replace(config, data=data)


def configuration(options: argparse.Namespace) -> Config:
    """Return the configuration to plan for: of --config, --model or --hf, with synthetic images as in --images."""
    batch = str(options.gpus * -(-LEAST_BATCH // options.gpus))
    begin = ["--config", options.config] if options.config else ["--run-dir", "runs/planned", "--gbs", batch]
    if options.model is not None:
        published_model(options.model)  # whose error names --model
        begin += ["--published-model", options.model, "--precision", "bf16", "--seq-length", "4096"]
    elif options.hf is not None:
        begin += ["--init-from", options.hf]
    if options.train_iters is not None:
        begin += ["--train-iters", str(options.train_iters)]
    config = parse([*begin, *options.run])
    try:
        config = with_model(config, weights=False)
    except UserError as error:
        raise UserError(str(error).replace("--init-from", "--hf") if options.hf else str(error)) from None
    vision = config.model.vision
    if options.images is not None and not (vision.num_layers or vision.encoder_free):
        raise UserError(f"--images {plain(options.images)}: this model has no vision encoder: leave --images out")
    if options.images is not None:
        count, side = _images(options.images, config.model.vision.patch_size * config.model.projector.pixel_shuffle)
        config = replace(config, data=replace(config.data, images_per_sample=(count,), image_sizes=(side,)))
    return config


def _images(text: str, multiple: int) -> tuple[int, int]:
    """Parse --images: (6, 1022) for `6x1024` and a multiple of 14; the side is rounded down to the multiple."""
    count, _, side = text.partition("x")
    if not (count.isdigit() and side.isdigit() and int(side) >= multiple):
        raise UserError(f"--images {plain(text)} is not COUNTxSIDE with a side of {multiple} pixels or more, as 6x1024")
    return int(count), int(side) // multiple * multiple


_DETECTION = 90.0  # seconds from a failure to the end of the attempt
# Options that are about the price of a machine and have no default.
_COSTS = ("samples", "price_per_hour", "spot_price_per_hour", "preemptions_per_day")


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
    for name in (*_COSTS, "train_iters", "restart_seconds", "stall_seconds"):
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
