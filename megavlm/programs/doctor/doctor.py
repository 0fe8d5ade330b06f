"""Check this machine: `megavlm doctor [--json [FILE]] [--no-measure] [--timeout SECONDS]`.

Report versions, devices with their peak and measured rates, communication and disk; then list each problem with the
command that fixes it. The exit status is 1 if a run could not work, else 0.

With --world, check all nodes together, started like the run: `torchrun … -m megavlm doctor --world`, or by srun.
It compares versions, code and GPUs, measures all links between nodes, and prints a line for each difference and
each slow node.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from megavlm.command_line.commands import Parser, complaint
from megavlm.config.messages import aligned
from megavlm.errors import RankError, UserError
from megavlm.files import write_out
from megavlm.programs.doctor.machine import Facts, collect
from megavlm.programs.doctor.problems import Problem, needs, problems, rows, world_problems

_PACKAGE = Path(__file__).resolve().parents[2]
_GIB = 2**30
_SIGNS = {"error": "✗", "warning": "!", "note": "·"}


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 1 if a run could not work, 2 if an argument or the environment is wrong, else 0."""
    try:
        options = _parser().parse_args(argv)
        return check_world(options) if options.world else check_machine(options)
    except UserError as error:
        if isinstance(error, RankError) or os.environ.get("RANK", "0") == "0":
            print(complaint("doctor", error, argv), file=sys.stderr)
        return error.status


def check_machine(options: argparse.Namespace) -> int:
    """Check this machine; return the exit status."""
    if options.profile is not None:
        raise UserError("--profile is what --world compares with: leave it out, or start with --world on all nodes")
    needed = needs(_PACKAGE.parent / "pyproject.toml")
    facts = collect(needed, folder=Path.cwd(), timeout=options.timeout, measure=not options.no_measure)
    found = problems(facts, needed)
    _write(options, rows_of(facts), found, facts=asdict(facts))
    return _status(found)


def check_world(options: argparse.Namespace) -> int:
    """Check all nodes; return this rank's exit status.

    Rank 0 returns 1 if a run could not work, the other ranks 0. Any rank returns 1 if the ranks do not meet in time or
    if a collective fails.
    """
    from megavlm.planner.hardware import profile, profile_of_device
    from megavlm.world import world_of

    place = world_of(os.environ)
    hardware = None if options.profile is None else profile(options.profile)
    if place.world_size == 1:
        raise UserError("--world checks several processes: start it as the run, by torchrun or srun on all nodes")
    os.environ.update(place.environment())
    import torch

    from megavlm.parallel.rendezvous import join
    from megavlm.programs.doctor.survey import Check, survey_world

    try:
        met = join(timedelta(seconds=options.timeout))
    except TimeoutError as error:
        what = str(error).partition(" (--")[0]
        remedy = "look at its process and host: is it started, and is rank 0's host reachable?"
        _write(options, (), [Problem("error", what, remedy)], world=None)
        return 1
    check = Check(met, limit=options.timeout)
    try:
        survey = survey_world(
            check, place, host=socket.gethostname(), package=_PACKAGE, measures=not options.no_measure
        )
    except RuntimeError as error:  # torch raises it for a lost peer, a failing device or a time limit
        if problem := check.blame(str(error).partition("\n")[0][:200]):
            _write(options, (), [problem], world=None)
        return 1
    if survey is None:
        return 0
    if hardware is None and survey.on_gpu:
        hardware = profile_of_device(torch.cuda.get_device_name())
    found = world_problems(survey, hardware)
    _write(options, rows(survey), found, world=asdict(survey))
    return _status(found)


def _write(
    options: argparse.Namespace, rows: Iterable[tuple[str, str]], found: Sequence[Problem], **data: object
) -> None:
    """Print facts and problems, or write them as JSON."""
    text = json.dumps({**data, "problems": [asdict(each) for each in found]}, indent=2)
    if options.json not in (None, "-"):
        write_out("--json", Path(options.json), text)
    print(text if options.json == "-" else as_text(rows, found), flush=True)


def as_text(rows: Iterable[tuple[str, str]], found: Sequence[Problem]) -> str:
    """Return a table of facts, followed by a line for each problem with its remedy."""
    table = list(rows)
    lines = [*aligned(table, left=(0, 1)), ""] if table else []
    lines += [f"{_SIGNS[each.level]} {each.level}: {each.what}: {each.remedy}" for each in found]
    return "\n".join(lines if found else [*lines, "nothing is missing, and nothing is slow"])


def rows_of(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each line of the report on one machine."""
    yield "python", ".".join(map(str, facts.python))
    for name, package in facts.packages.items():
        yield name, package.version + ("" if package.error is None else f"  ({package.error})")
    known = {"CUDA of torch": facts.torch_cuda, "NCCL": facts.nccl, "driver": facts.driver}
    yield from ((name, value) for name, value in known.items() if value is not None)
    for index, device in enumerate(facts.devices):
        capability = ".".join(map(str, device.capability))
        yield f"GPU {index}", f"{device.name}, {device.memory / _GIB:.0f} GiB, compute capability {capability}"
    if not facts.devices:
        yield "GPU", "none"
    for rate in facts.rates:
        share = "" if rate.peak is None else f", {rate.measured / rate.peak:.0%} of {rate.peak:.0f}"
        yield rate.what, f"{rate.measured:.3g} {rate.unit}{share}"
    for backend, error in facts.communication.items():
        yield f"{backend} loopback", "works" if error is None else error
    for name, size in {"free disk": facts.disk_free, "/dev/shm": facts.shared_memory}.items():
        if size is not None:
            yield name, f"{size / _GIB:.1f} GiB"


def _status(found: Sequence[Problem]) -> int:
    return int(any(each.level == "error" for each in found))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Report what this machine offers, what is missing, and how to fix it; with --world, of all nodes."
    )
    parser.add_argument(
        "--world",
        action="store_true",
        help="Compare all nodes and measure the links between them; start it like a run, by torchrun or srun.",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help="With --world: rates to compare with, of a GPU (h100), a cloud's machine (a3-megagpu-8g) or a file of "
        "megavlm calibrate; default: those of the GPUs.",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="Print facts and problems as JSON instead of text, or write them to FILE in addition to the text.",
    )
    parser.add_argument("--no-measure", action="store_true", help="Do not measure rates of devices and links.")
    parser.add_argument(
        "--timeout",
        type=float,
        default=120,
        metavar="SECONDS",
        help="Time limit for the import of a package, a collective operation, or a part of --world; an error if "
        "exceeded.",
    )
    return parser
