"""What has become of each variant, from the files of its run folder; and which are still to train."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megavlm.errors import UserError
from megavlm.files import replace_file
from megavlm.programs.sweep.grid import Variant
from megavlm.resilience.status import read_status

State = Literal["to do", "running", "stopped", "failed", "finished"]
_ALIVE = 30.0  # seconds: a run touches its lock every five
_FILE, _SENT = "sweep.json", "submitted.txt"


def run_dir_of(variant: Variant) -> Path:
    return Path(variant.flags[-1])


def state_of(variant: Variant) -> State:
    """Return the state of a variant. A run that was killed is to do: its lock is old."""
    run_dir = run_dir_of(variant)
    state = read_status(run_dir).get("state")
    if state == "running":
        try:
            return "running" if time.time() - (run_dir / "lock").stat().st_mtime < _ALIVE else "to do"
        except OSError:
            return "to do"
    return state if state in ("stopped", "failed", "finished") else "to do"


def to_train(variants: Sequence[Variant], *, retry_failed: bool) -> list[Variant]:
    """Return the variants that are to be started: not those that finished or run, and those that failed on request."""
    done = {"finished", "running"} | (set() if retry_failed else {"failed"})
    return [variant for variant in variants if state_of(variant) not in done]


def note_flags(folder: Path, variants: Sequence[Variant]) -> None:
    """Write down with which flags each variant trains. Raises UserError if one has begun with others before.

    Else a grid that was changed would be skipped as finished, or go on half way with other options.
    """
    before = noted(folder)
    for variant in variants:
        flags = before.get(variant.name)
        if flags is not None and tuple(flags) != variant.flags and run_dir_of(variant).exists():
            changed = " ".join(sorted(set(flags) ^ set(variant.flags)))
            raise UserError(
                f"variant {variant.name} began with other options ({changed[:120]}): give the grid another run_dir, or "
                f"remove {run_dir_of(variant)}"
            )
    write_whole(folder / _FILE, json.dumps({**before, **{each.name: each.flags for each in variants}}, indent=1) + "\n")


def note_submitted(folder: Path, variant: Variant) -> None:
    """Write down that a variant was sent to a service whose queue is not looked at here."""
    sent = dict.fromkeys([*_submitted(folder), variant.name])
    write_whole(folder / _SENT, "".join(f"{name}\n" for name in sent))


def unsubmitted(folder: Path, variants: Sequence[Variant], *, again: bool) -> list[Variant]:
    """Return the variants that were not sent before; with `again` also those that were sent and then failed."""
    sent = set(_submitted(folder))
    return [each for each in variants if each.name not in sent or (again and state_of(each) == "failed")]


def _submitted(folder: Path) -> list[str]:
    try:
        return (folder / _SENT).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def noted(folder: Path) -> dict[str, list[str]]:
    """Return the flags that were written down, by variant; none of what is no list of texts."""
    try:
        found = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    flags = found.items() if isinstance(found, dict) else ()
    return {name: each for name, each in flags if isinstance(each, list) and all(isinstance(f, str) for f in each)}


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file, so that a reader sees the one before or the new one. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
