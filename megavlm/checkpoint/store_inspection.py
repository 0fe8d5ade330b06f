"""List, verify, describe and copy checkpoints in stores, as `inspection.py` does on disks. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megavlm.checkpoint import inspection, manifest, remote, retention
from megavlm.checkpoint.inspection import Entry
from megavlm.checkpoint.manifest import MANIFEST, SUMMARY
from megavlm.checkpoint.remote import RemoteCheckpoint
from megavlm.checkpoint.retention import Holds, Keep
from megavlm.errors import UserError
from megavlm.storage.store import Store, StoreError
from megavlm.storage.urls import is_url


def checkpoints_of(url: str) -> list[RemoteCheckpoint]:
    """Return the checkpoints that a URL names: itself, or all of a run, oldest first. Raises UserError for none."""
    store, only = remote.place_of(url)
    found = [each for each in remote.found_in(store) if only in (None, each.name)]
    if not found:
        raise UserError(f"{url} holds no checkpoints: give the URL of --checkpoint-dir, or of a checkpoint in it")
    return found


def entries(url: str) -> Iterator[Entry]:
    """Yield the checkpoints of a run, oldest first."""
    found = checkpoints_of(url)
    metrics = {each.iteration: _metrics(each) for each in found}
    best = inspection.best_by(found[-1], metrics, summary_of)
    for each in found:
        saved = each.folder.modified(MANIFEST if each.is_complete else min(each.files)).astimezone()
        state = remote.first_look(each) or "whole"
        size = sum(each.files.values())
        yield Entry(each.name, each.iteration, size, saved, metrics[each.iteration], each.iteration == best, state)


def problem_of(checkpoint: RemoteCheckpoint) -> str | None:
    """Read all files of a checkpoint and return what is wrong with it; None if nothing is."""
    return remote.damage(checkpoint)


def summary_of(checkpoint: RemoteCheckpoint) -> dict[str, Any]:
    """Return a checkpoint's own description, `megavlm.json`. Raises UserError if it cannot be read."""
    try:
        summary = json.loads(checkpoint.folder.read(SUMMARY, at_most=2**24))
        if not isinstance(summary, dict):
            raise ValueError("it is no JSON object")
    except (StoreError, ValueError, RecursionError) as error:
        raise UserError(f"{checkpoint}: {SUMMARY} cannot be read ({error})") from error
    return summary


def doomed(url: str, rule: Keep) -> list[RemoteCheckpoint]:
    """Return the complete checkpoints that the rule does not keep, oldest first."""
    found = [each for each in checkpoints_of(url) if each.is_complete]
    metrics = {each.iteration: _metrics(each) for each in found} if rule.best else {}
    known = {iteration: each[rule.best] for iteration, each in metrics.items() if rule.best in each}
    keep = retention.kept([each.iteration for each in found], rule, known)
    return [each for each in found if each.iteration not in keep]


def delete(checkpoint: RemoteCheckpoint) -> bool:
    """Delete a checkpoint."""
    remote.remove(checkpoint.folder)
    return True


def copy(source: Path | RemoteCheckpoint, to: str) -> str:
    """Copy a checkpoint between a disk and a store; verify it while it is read and once it is written.

    Returns where it is. Raises UserError for one that is damaged or there already, and StoreError.
    """
    if isinstance(source, Path):
        return _copy_to_store(source, Store.at(to))
    if is_url(to):
        raise UserError(f"{source} is in a store like {to}: copy it to a folder first, and from there")
    root = Path(to)
    if (root / source.name).exists():
        raise UserError(f"{root / source.name} is already there: remove it, or copy to another folder")
    if problem := remote.first_look(source):
        raise UserError(f"{source} is damaged: {problem}")
    sums = source.sums()
    remote.download(source, root, sums, sums)
    return str(remote.commit_download(source, root))


def _copy_to_store(source: Path, store: Store) -> str:
    holds = Holds()
    try:
        holds.add(source)
        if problem := manifest.first_look(source):
            raise UserError(f"{source} is damaged: {problem}")
        if any(each.name == source.name for each in remote.complete_in(store)):
            raise UserError(f"{store.url}/{source.name} is already there: remove it, or copy to another place")
        remote.upload(source, store, done=set())
    finally:
        holds.release()
    (copied,) = (each for each in remote.complete_in(store) if each.name == source.name)
    if problem := remote.damage(copied):
        raise UserError(f"{copied} does not read back as it was written: {problem}")
    return str(copied)


def _metrics(checkpoint: RemoteCheckpoint) -> dict[str, float]:
    if SUMMARY not in checkpoint.files:
        return {}
    return retention.metrics_in(checkpoint.folder.read(SUMMARY, at_most=2**24))
