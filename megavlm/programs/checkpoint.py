"""List, verify and show checkpoints: `megavlm checkpoint list|verify|show …`.

Checkpoints may be in a folder on a disk or in an object store. The command does not need torch. The exit status is 1 if
`verify` finds a damaged checkpoint, 2 for a mistake in the command, else 0.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from megavlm.checkpoint import remote
from megavlm.command_line.commands import Parser, reported
from megavlm.errors import UserError
from megavlm.storage.store import StoreError


@reported("checkpoint")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 1 verify found damage, 2 an argument is wrong (reported in one line)."""
    options = _parser().parse_args(argv)
    try:
        status: int = options.action(options)
    except StoreError as error:
        raise UserError(str(error)) from error
    return status


def _list(options: argparse.Namespace) -> int:
    found = remote.checkpoints_at(options.run)
    best = remote.best_of(found)
    for each in found:
        parts = [each.name, f"{each.bytes / 1e9:10.3f} GB", f"{each.saved:%Y-%m-%d %H:%M:%S}"]
        parts += [f"{name} {value:.4g}" for name, value in each.metrics().items()]
        parts += ["best"] if each.iteration == best else []
        print("  ".join([*parts, remote.first_look(each) or "whole"]))
    return 0


def _verify(options: argparse.Namespace) -> int:
    damaged = 0
    for place in options.paths:
        for each in remote.checkpoints_at(place):
            problem = remote.damage(each)
            damaged += problem is not None
            print(f"{each}: {problem or 'whole'}", flush=True)
    return int(damaged > 0)


def _show(options: argparse.Namespace) -> int:
    print(json.dumps(remote.checkpoints_at(options.checkpoint)[-1].summary(), indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="List, verify and show checkpoints.")
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
    return parser
