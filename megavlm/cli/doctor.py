"""Check this machine: `python tools/doctor.py [--json [FILE]] [--no-measure] [--timeout SECONDS]`.

Report versions, devices with their peak and measured rates, communication and disk; then list each problem with the
command that fixes it. The exit status is 1 if a run could not work, else 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megavlm.doctor.collect import collect
from megavlm.doctor.formatting import as_json, as_text
from megavlm.doctor.needs import needs
from megavlm.doctor.problems import problems


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 1 if a run could not work on this machine, else 0."""
    options = _parser().parse_args(argv)
    needed = needs(Path(__file__).resolve().parents[2] / "pyproject.toml")
    facts = collect(needed, folder=Path.cwd(), timeout=options.timeout, measure=not options.no_measure)
    found = problems(facts, needed)
    if options.json not in (None, "-"):
        Path(options.json).write_text(as_json(facts, found), encoding="utf-8")
    print(as_json(facts, found) if options.json == "-" else as_text(facts, found))
    return int(any(each.level == "error" for each in found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Report what this machine offers, what is missing, and how to fix it.")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="Print facts and problems as JSON instead of text, or write them to FILE in addition to the text.",
    )
    parser.add_argument("--no-measure", action="store_true", help="Do not measure the device's rates.")
    parser.add_argument(
        "--timeout",
        type=float,
        default=120,
        metavar="SECONDS",
        help="Time limit for the import of a package or a collective operation; an error if exceeded. Default: 120.",
    )
    return parser
