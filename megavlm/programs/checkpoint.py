"""List, verify, show, prune and copy checkpoints: `megavlm checkpoint list|verify|show|prune|copy …`.

A folder on a disk is read like one in a store. Without torch. The exit status is 1 if a checkpoint is damaged, 2 for a
mistake in the command, else 0.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from megavlm.checkpoint import folders, manifest, remote
from megavlm.checkpoint.folders import Holds, Keep
from megavlm.checkpoint.manifest import MANIFEST
from megavlm.checkpoint.remote import DamagedInStore, StoredCheckpoint
from megavlm.command_line.commands import Parser, count, reported
from megavlm.config.messages import plain
from megavlm.errors import UserError
from megavlm.storage import is_url
from megavlm.storage.store import Store, StoreError


@reported("checkpoint")
def main(argv: Sequence[str]) -> int:
    """Return the exit status."""
    options = _parser().parse_args(argv)
    try:
        status: int = options.action(options)
    except StoreError as error:
        raise UserError(str(error)) from error
    return status


def checkpoints_of(place: str) -> list[StoredCheckpoint]:
    """Return the checkpoints that a path or URL names: itself, or all of a run, oldest first. Raises UserError."""
    store, only = remote.place_of(place)
    if found := [each for each in remote.found_in(store) if only in (None, each.name)]:
        return found
    raise UserError(f"{place} holds no checkpoints: give a run folder or URL, its checkpoints, or one of them")


def _list(options: argparse.Namespace) -> int:
    for each in checkpoints_of(options.run):
        saved = each.folder.modified(MANIFEST if each.is_complete else min(each.files)).astimezone()
        parts = [each.name, f"{each.bytes / 1e9:10.3f} GB", f"{saved:%Y-%m-%d %H:%M:%S}"]
        parts += [f"{name} {value:.4g}" for name, value in each.metrics().items()]
        print("  ".join([*parts, remote.first_look(each) or "whole"]))
    return 0


def _verify(options: argparse.Namespace) -> int:
    damaged = 0
    for place in options.paths:
        for each in checkpoints_of(place):
            problem = remote.damage(each)
            damaged += problem is not None
            print(f"{each}: {problem or 'whole'}", flush=True)
    return int(damaged > 0)


def _show(options: argparse.Namespace) -> int:
    print(json.dumps(checkpoints_of(options.checkpoint)[-1].summary(), indent=2))
    return 0


def _prune(options: argparse.Namespace) -> int:
    rule = Keep(options.keep, options.keep_every, options.keep_best, options.mode)
    found = [each for each in checkpoints_of(options.run) if each.is_complete]
    metrics = {each.iteration: each.metrics() for each in found} if rule.best else {}
    known = sorted({name for each in metrics.values() for name in each})
    if rule.best and rule.best not in known:
        uses = f"use one of {', '.join(known)}" if known else "leave it out"
        raise UserError(f"--keep-best {plain(rule.best)} is a metric that no checkpoint has: {uses}")
    values = {iteration: each[rule.best] for iteration, each in metrics.items() if rule.best in each}
    keep = folders.kept([each.iteration for each in found], rule, values)
    for each in found:
        if each.iteration in keep:
            continue
        if not options.delete:
            print(f"{each} would be deleted: add --delete")
        elif is_url(options.run):
            remote.remove(each.folder)
            print(f"{each} is deleted")
        else:
            print(f"{each} {'is deleted' if folders.delete(Path(str(each))) else 'stays: somebody loads it'}")
    return 0


def _copy(options: argparse.Namespace) -> int:
    source = checkpoints_of(options.checkpoint)[-1]
    if Path(options.to).name.startswith("iter_"):
        raise UserError(f"FOLDER {options.to} has the name of a checkpoint: name the folder to put a copy into")
    print(f"{copy(source, options.to)}: copied and verified")
    return 0


def copy(source: StoredCheckpoint, to: str) -> str:
    """Copy a checkpoint between disks, or a disk and a store; verify it while it is read and once it is written.

    Returns where it is. Raises UserError for one that is damaged or there already, and StoreError.
    """
    target, holds = Store.at(to), Holds()
    if any(each.name == source.name for each in remote.found_in(target)):
        raise UserError(f"{to}/{source.name} is already there: remove it, or copy to another place")
    if is_url(to) and is_url(str(source)):
        raise UserError(f"{source} is in a store like {to}: copy it to a folder first, and from there")
    try:
        if not is_url(str(source)):
            holds.add(Path(str(source)))
        if problem := remote.first_look(source):
            raise UserError(f"{source} is damaged: {problem}")
        if not is_url(to):
            sums = source.sums()
            remote.download(source, Path(to), sums, sums)
            return str(remote.commit_download(source, Path(to)))
        remote.upload(Path(str(source)), target, done=set())
    except DamagedInStore:
        shutil.rmtree(remote.temporary_for(Path(to), source.name), ignore_errors=True)
        raise
    except StoreError:
        raise
    except OSError as error:
        raise UserError(f"{source} cannot be copied to {to}: {manifest.in_words(error)}") from error
    finally:
        holds.release()
    (copied,) = (each for each in remote.complete_in(target) if each.name == source.name)
    if problem := remote.damage(copied):
        raise UserError(f"{copied} does not read back as it was written: {problem}")
    return str(copied)


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
    prune.add_argument("--keep", type=count, required=True, metavar="K", help="Number of latest checkpoints to keep.")
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
        help="Whether the smallest or the largest value is best.",
    )
    prune.add_argument("--delete", action="store_true", help="Delete them; default: print them only.")
    prune.set_defaults(action=_prune)

    copy = commands.add_parser("copy", help="Copy a checkpoint and verify the copy.")
    copy.add_argument("checkpoint", metavar="PATH", help="Checkpoint, or a run: its latest one. A folder or a URL.")
    copy.add_argument("to", metavar="FOLDER", help="Folder or URL to put it into, as RUN/checkpoints.")
    copy.set_defaults(action=_copy)
    return parser
