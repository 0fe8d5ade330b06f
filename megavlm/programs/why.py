"""Say what holds a run back: `megavlm why RUN_DIR`. It reads metrics.jsonl and events.jsonl, no more."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megavlm.command_line.commands import Parser, reported
from megavlm.errors import UserError
from megavlm.programs.preview.account import records_of
from megavlm.programs.preview.history import history_of
from megavlm.programs.preview.why import findings
from megavlm.resilience.events import events


@reported("why")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 no run is there."""
    run_dir = _parser().parse_args(argv).run_dir
    steps = records_of(run_dir)
    if not steps:
        raise UserError(f"{run_dir} has no metrics.jsonl with a step: name the folder of a run")
    happened = events(run_dir)
    past = history_of(happened, steps)
    if past is not None:
        print(f"{past.goodput:.1%} of {past.wall:,.0f} s went into training ({len(steps)} iterations)")
    found = findings(steps, past, happened)
    print("\n".join(str(each) for each in found) if found else "nothing takes as much as 2 % of the time")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Say what holds a run back, and the remedy.", allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, as given to --run-dir.")
    return parser
