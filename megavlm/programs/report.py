"""Compare runs on one page: `megavlm report RUN_DIR…`; they need not have ended.

Write one self-contained HTML page: loss by steps, tokens and hours, held-out data, speed, memory, data, the options in
which the runs differ, and their events.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megavlm.command_line.commands import Parser, reported
from megavlm.files import write_out
from megavlm.programs.preview.report import page
from megavlm.programs.preview.run_data import read_run


@reported("report")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument is wrong (reported in one line)."""
    given = _parser().parse_args(argv)
    write_out("--out", given.out, page([read_run(run) for run in given.runs]))
    print(f"wrote {given.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Compare runs on one HTML page.", allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="Folders of runs, as given to --run-dir.")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="Write the page here; default: %(default)s.",
    )
    return parser
