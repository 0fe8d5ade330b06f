"""List, verify, show, prune and copy checkpoints: `python tools/checkpoint.py list|verify|show|prune|copy …`.

Without torch. The exit status is 1 if a checkpoint is damaged, 2 for a mistake in the command, else 0.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from megavlm.checkpoint import inspection, store_inspection
from megavlm.checkpoint.retention import Keep
from megavlm.config.commands import Parser, reported
from megavlm.config.messages import plain
from megavlm.errors import UserError
from megavlm.storage.store import StoreError
from megavlm.storage.urls import is_url


@reported("checkpoint")
def main(argv: Sequence[str]) -> int:
    """Return the exit status."""
    options = _parser().parse_args(argv)
    try:
        status: int = options.action(options)
    except StoreError as error:
        raise UserError(str(error)) from error
    return status


def _at(text: str) -> tuple[ModuleType, Path | str]:
    """Return the functions for a place, which is a path or a URL, and the place as they take it."""
    return (store_inspection, text) if is_url(text) else (inspection, Path(text))


def _list(options: argparse.Namespace) -> int:
    functions, run = _at(options.run)
    for entry in functions.entries(run):
        parts = [entry.name, f"{entry.bytes / 1e9:10.3f} GB", f"{entry.saved:%Y-%m-%d %H:%M:%S}"]
        parts += [f"{name} {value:.4g}" for name, value in entry.metrics.items()] + ["best"] * entry.is_best
        print("  ".join([*parts, entry.state]))
    return 0


def _verify(options: argparse.Namespace) -> int:
    damaged = 0
    for text in options.paths:
        functions, place = _at(text)
        for checkpoint in functions.checkpoints_of(place):
            problem = functions.problem_of(checkpoint)
            damaged += problem is not None
            print(f"{checkpoint}: {problem or 'whole'}", flush=True)
    return int(damaged > 0)


def _show(options: argparse.Namespace) -> int:
    functions, place = _at(options.checkpoint)
    print(json.dumps(functions.summary_of(functions.checkpoints_of(place)[-1]), indent=2))
    return 0


def _prune(options: argparse.Namespace) -> int:
    if options.keep < 1:
        raise UserError("--keep must be at least 1")
    functions, run = _at(options.run)
    rule = Keep(options.keep, options.keep_every, options.keep_best, options.mode)
    known = sorted({name for entry in functions.entries(run) for name in entry.metrics}) if rule.best else []
    if rule.best and rule.best not in known:
        uses = f"use one of {', '.join(known)}" if known else "leave it out"
        raise UserError(f"--keep-best {plain(rule.best)} is a metric that no checkpoint has: {uses}")
    for checkpoint in functions.doomed(run, rule):
        if not options.delete:
            print(f"{checkpoint} would be deleted: add --delete")
        else:
            print(f"{checkpoint} {'is deleted' if functions.delete(checkpoint) else 'stays: somebody loads it'}")
    return 0


def _copy(options: argparse.Namespace) -> int:
    functions, place = _at(options.checkpoint)
    source = functions.checkpoints_of(place)[-1]
    if Path(options.to).name.startswith("iter_"):
        raise UserError(f"FOLDER {options.to} has the name of a checkpoint: name the folder to put a copy into")
    in_a_store = is_url(options.checkpoint) or is_url(options.to)
    copied = store_inspection.copy(source, options.to) if in_a_store else inspection.copy(source, Path(options.to))
    print(f"{copied}: copied and verified")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="List, verify, show, prune and copy checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="List the checkpoints of a run, and which are damaged at a first look.")
    listing.add_argument("run", metavar="RUN", help="Run folder, its checkpoints folder, or a URL.")
    listing.set_defaults(action=_list)

    verify = commands.add_parser("verify", help="Read all files and compare them with their checksums.")
    verify.add_argument(
        "paths", nargs="+", metavar="PATH", help="Checkpoints, or runs: all of theirs. Folders or URLs."
    )
    verify.set_defaults(action=_verify)

    show = commands.add_parser("show", help="Print what a checkpoint is: model, layout, iteration, data.")
    show.add_argument("checkpoint", metavar="PATH", help="Checkpoint, or a run: its latest one. A folder or a URL.")
    show.set_defaults(action=_show)

    prune = commands.add_parser("prune", help="Print which checkpoints the rule does not keep, or delete them.")
    prune.add_argument("run", metavar="RUN", help="Run folder, its checkpoints folder, or a URL.")
    prune.add_argument("--keep", type=int, required=True, metavar="K", help="Number of latest checkpoints to keep.")
    prune.add_argument(
        "--keep-every", type=int, default=0, metavar="N", help="Also keep multiples of this iteration; default: none."
    )
    prune.add_argument(
        "--keep-best", metavar="METRIC", help="Also keep the best one by this number of its iteration; default: none."
    )
    prune.add_argument(
        "--keep-best-mode",
        choices=("min", "max"),
        default="min",
        dest="mode",
        help="Whether the smallest or the largest value is best; default: min.",
    )
    prune.add_argument("--delete", action="store_true", help="Delete them; default: print them only.")
    prune.set_defaults(action=_prune)

    copy = commands.add_parser("copy", help="Copy a checkpoint and verify the copy.")
    copy.add_argument("checkpoint", metavar="PATH", help="Checkpoint, or a run: its latest one. A folder or a URL.")
    copy.add_argument("to", metavar="FOLDER", help="Folder or URL to put it into, as RUN/checkpoints.")
    copy.set_defaults(action=_copy)
    return parser
