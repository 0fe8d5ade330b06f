"""Check this machine: `megavlm doctor [--json [FILE]] [--no-measure] [--timeout SECONDS]`.

Report versions, devices with their peak and measured rates, communication and disk; then list each problem with the
command that fixes it. The exit status is 1 if a run could not work, else 0.

With --world, check all nodes together, started like the run: `torchrun … -m megavlm doctor --world`, or by srun.
Versions, code, GPUs, network adapters and clocks are compared, all links between nodes measured, and what differs or
is slow is named, a line each.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from megavlm.command_line.commands import Parser, complaint
from megavlm.errors import RankError, UserError
from megavlm.files import write_out
from megavlm.programs.doctor.collect import collect
from megavlm.programs.doctor.formatting import as_json, as_lines, as_text
from megavlm.programs.doctor.needs import needs
from megavlm.programs.doctor.problems import Problem, problems

_PACKAGE = Path(__file__).resolve().parents[2]


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
    _write(options, as_text(facts, found), as_json(facts, found))
    return _status(found)


def check_world(options: argparse.Namespace) -> int:
    """Check all nodes; return this rank's exit status, which is 1 on rank 0 alone if a run could not work."""
    from megavlm.planner.hardware import profile, profile_of_device
    from megavlm.world import world_of

    place = world_of(os.environ)
    hardware = None if options.profile is None else profile(options.profile)
    if place.world_size == 1:
        raise UserError("--world checks several processes: start it as the run, by torchrun or srun on all nodes")
    os.environ.update(place.environment())
    import torch

    from megavlm.parallel.rendezvous import join
    from megavlm.programs.doctor.parts import Parts
    from megavlm.programs.doctor.world import release, survey_world
    from megavlm.programs.doctor.world_problems import world_problems
    from megavlm.programs.doctor.world_report import world_json, world_text

    def tell(problem: Problem) -> None:
        _write(options, "\n".join(as_lines([problem])), world_json(None, [problem]))
        sys.stdout.flush()

    try:
        met = join(timedelta(seconds=options.timeout))
    except TimeoutError as error:
        what = str(error).partition(" (--")[0]
        tell(Problem("error", what, "look at its process and host: is it started, and is rank 0's host reachable?"))
        return 1
    parts = Parts(met.store, met.rank, met.world, limit=options.timeout, tell=tell)
    host = socket.gethostname()
    try:
        survey = survey_world(met, place, host=host, package=_PACKAGE, parts=parts, measures=not options.no_measure)
    except RuntimeError as error:  # of torch: a peer has gone, a device fails
        parts.fail(f"{host}: {error}")
        return 1
    parts.close()
    if survey is None:
        return 0
    release(met)
    if hardware is None and survey.on_gpu:
        hardware = profile_of_device(torch.cuda.get_device_name())
    found = world_problems(survey, hardware)
    _write(options, world_text(survey, found, hardware), world_json(survey, found))
    return _status(found)


def _write(options: argparse.Namespace, text: str, json: str) -> None:
    if options.json not in (None, "-"):
        write_out("--json", Path(options.json), json)
    print(json if options.json == "-" else text)


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
        "exceeded. Default: 120.",
    )
    return parser
