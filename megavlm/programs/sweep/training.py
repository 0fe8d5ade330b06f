"""Train the variants of a sweep, on this machine or as one array job of SLURM.

The state of each variant is read from the files of its run folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megavlm.errors import UserError
from megavlm.files import open_to_append, write_out
from megavlm.json_files import read_own
from megavlm.programs.doctor.machine import gpus_here
from megavlm.programs.launch import slurm
from megavlm.programs.launch.job import Children, Command, Job
from megavlm.programs.sweep.grid import Grid, Variant
from megavlm.resilience.events import STOPPED, read_status
from megavlm.resilience.lock import silent_since

State = Literal["to do", "running", "stopped", "failed", "finished"]
_FILE = "sweep.json"
_LOOK = 0.1  # seconds between two polls of the running variants


def run_dir_of(variant: Variant) -> Path:
    return Path(variant.flags[-1])


def state_of(variant: Variant) -> State:
    """Return the state of a variant. A killed run, whose lock is old, is `to do`."""
    run_dir = run_dir_of(variant)
    state = read_status(run_dir).get("state")
    if state == "running":
        return "running" if (run_dir / "lock").exists() and silent_since(run_dir) is None else "to do"
    return state if state in ("stopped", "failed", "finished") else "to do"


def to_train(variants: Sequence[Variant], *, retry_failed: bool) -> list[Variant]:
    """Return the variants to start: all but finished and running ones, and failed ones only with `retry_failed`."""
    done = {"finished", "running"} | (set() if retry_failed else {"failed"})
    return [variant for variant in variants if state_of(variant) not in done]


def note_flags(folder: Path, variants: Sequence[Variant]) -> None:
    """Save the flags of each variant in `folder`. Raises UserError if a variant has begun with other flags.

    Without this check, variants of a changed grid would be skipped as finished, or resume with other options.
    """
    before = noted(folder)
    for variant in variants:
        flags = before.get(variant.name, variant.flags)
        if tuple(flags) != variant.flags and run_dir_of(variant).exists():
            changed = " ".join(sorted(set(flags) ^ set(variant.flags)))
            raise UserError(
                f"variant {variant.name} began with other options ({changed[:120]}): give the grid another run_dir, or "
                f"remove {run_dir_of(variant)}"
            )
    write_out(
        "run_dir",
        folder / _FILE,
        json.dumps({**before, **{each.name: each.flags for each in variants}}, indent=1) + "\n",
    )


def noted(folder: Path) -> dict[str, list[str]]:
    """Return the saved flags of each variant, by name (`note_flags`)."""
    return read_own(folder / _FILE)


def train_here(
    grid: Grid,
    variants: Sequence[Variant],
    *,
    parallel: int,
    say: Callable[[str], None],
    profile: Sequence[str] = (),
) -> int:
    """Train variants, `parallel` at a time, each on its own GPUs; `profile` is added to the words of `megavlm launch`.

    Return 75 if this process got a signal, else 1 if a variant failed, else 0. A signal is forwarded to the running
    variants, and no other variant starts after it. Raises UserError for too few GPUs.
    """
    gpus, size = gpus_here(), grid.processes
    if gpus and parallel * size > len(gpus):
        raise UserError(
            f"--parallel {parallel} variants of {size} processes need {parallel * size} GPUs, and {len(gpus)} are "
            "here: train fewer at a time"
        )
    waiting, worst, children = list(variants), 0, Children()
    free = [gpus[slot * size : (slot + 1) * size] for slot in range(parallel)]
    running: dict[subprocess.Popen[bytes], tuple[Variant, list[str]]] = {}
    try:
        while running or (waiting and not children.asked):
            while waiting and free and not children.asked:
                variant, own = waiting.pop(0), free.pop(0)
                running[_started(children, grid, variant, own, profile)] = variant, own
            time.sleep(_LOOK)
            for ended in [each for each in running if each.poll() is not None]:
                variant, own = running.pop(ended)
                free.append(own)
                status, done = ended.returncode, len(variants) - len(waiting) - len(running)
                how = {0: "finished", STOPPED: "stopped"}.get(status, f"failed with {status}: see its .out file")
                say(f"{done} of {len(variants)}: {variant.name} {how}")
                worst = max(worst, 0 if status in (0, STOPPED) else 1)
    finally:
        children.leave()
    return STOPPED if children.asked else worst


def _started(
    children: Children, grid: Grid, variant: Variant, gpus: Sequence[str], profile: Sequence[str]
) -> subprocess.Popen[bytes]:
    run_dir = run_dir_of(variant)
    words = (sys.executable, "-m", "megavlm", "launch", "local", "--gpus-per-node", str(grid.processes), *profile)
    command = Command((*words, "--", *variant.flags), {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with open_to_append(run_dir.with_name(f"{run_dir.name}.out")) as output:
        return children.start(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)


def array_command(
    grid: Grid,
    variants: Sequence[Variant],
    options: Sequence[str],
    *,
    parallel: int,
    profile: str | None = None,
    image: str | None = None,
) -> Command:
    """Return the command that submits the variants as an array job, `parallel` at a time (0: without a limit)."""
    folder = Path(grid.run_dir)
    at_once = f"%{parallel}" if parallel else ""
    printed = f"{str(folder).replace('%', '%%')}/%A_%a.out"
    array = [f"--array=0-{len(variants) - 1}{at_once}", f"--output={printed}"]
    job = Job(grid.nodes, grid.processes, ())
    command = slurm.specification(job, [*array, *options], profile=profile, image=image)
    return replace(command, environment={**command.environment, "MEGAVLM_ARRAY": str(flags_folder(grid, variants))})


def flags_folder(grid: Grid, variants: Sequence[Variant]) -> Path:
    """Return the folder of flags for an array job of these variants; arrays of other variants have other folders."""
    return Path(grid.run_dir) / "array" / f"{zlib.crc32(repr(variants).encode()):08x}"


def write_flags(grid: Grid, variants: Sequence[Variant]) -> None:
    """Write the flags of each array task to a file named by its number, with a NUL (which no flag has) after each."""
    for number, variant in enumerate(variants):
        content = b"".join(os.fsencode(f"{flag}\0") for flag in variant.flags)
        write_out("run_dir", flags_folder(grid, variants) / str(number), content)
