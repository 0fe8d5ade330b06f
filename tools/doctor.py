"""What this machine offers and lacks: `python tools/doctor.py [--json [FILE]] [--no-measure]`.

Versions, devices with their peaks beside what a short measurement reaches, communication, disk; then each thing that is
missing or wrong with the command that mends it. Exit status 1 if a run could not work, 0 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the doctor must also speak where nothing is installed

from megavlm.doctor import report  # noqa: E402
from megavlm.doctor.collect import collect  # noqa: E402
from megavlm.doctor.findings import findings  # noqa: E402
from megavlm.doctor.needs import needs_of  # noqa: E402


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Say what this machine offers a run, what it lacks, and what mends it."
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="facts and findings as JSON: printed, or into a file as well",
    )
    parser.add_argument("--no-measure", action="store_true", help="leave the device's rates unmeasured")
    options = parser.parse_args(argv)
    needs = needs_of(ROOT / "pyproject.toml")
    facts = collect(needs, folder=Path.cwd(), measure=not options.no_measure)
    found = findings(facts, needs)
    if options.json not in (None, "-"):
        Path(options.json).write_text(report.as_json(facts, found), encoding="utf-8")
    print(report.as_json(facts, found) if options.json == "-" else report.text(facts, found))
    return int(any(each.level == "error" for each in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
