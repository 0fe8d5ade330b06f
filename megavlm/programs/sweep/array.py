"""Describe variants as one array job of SLURM: launch/slurm.sbatch reads the flags of its task from a file of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megavlm.errors import UserError
from megavlm.programs.launch import slurm
from megavlm.programs.launch.job import Command, Job
from megavlm.programs.sweep.grid import Grid, Variant
from megavlm.programs.sweep.state import write_whole

_FLAGS, _JOB = "array", "array.job"


def specification(
    grid: Grid,
    variants: Sequence[Variant],
    options: Sequence[str],
    *,
    parallel: int,
    profile: str | None = None,
    image: str | None = None,
) -> Command:
    """Return the command that submits the variants, `parallel` of them at a time (0: as many as there is room for)."""
    folder = Path(grid.run_dir)
    at_once = f"%{parallel}" if parallel else ""
    printed = f"{str(folder).replace('%', '%%')}/%A_%a.out"
    array = [f"--array=0-{len(variants) - 1}{at_once}", f"--output={printed}", "--parsable"]
    job = Job(grid.nodes, grid.processes, ())
    command = slurm.specification(job, [*array, *options], profile=profile, image=image)
    return replace(command, environment={**command.environment, "MEGAVLM_ARRAY": str(folder / _FLAGS)})


def write_flags(grid: Grid, variants: Sequence[Variant]) -> None:
    """Write the flags of each task to a file named by its number, each followed by a NUL, which no flag can have."""
    for number, variant in enumerate(variants):
        write_whole(Path(grid.run_dir) / _FLAGS / str(number), b"".join(os.fsencode(f"{f}\0") for f in variant.flags))


def refuse_second(grid: Grid) -> None:
    """Raise UserError if an array of this sweep is still in the queue: a second would train the same folders."""
    note = Path(grid.run_dir) / _JOB
    if not note.exists():
        return
    number = note.read_text().strip()
    try:
        queued = subprocess.run(["squeue", "--noheader", "--jobs", number], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return
    if queued.returncode == 0 and queued.stdout.strip():
        raise UserError(f"array job {number} of this sweep is in the queue: wait for it, or scancel {number}")


def submit(grid: Grid, command: Command, environment: dict[str, str]) -> int:
    """Send the array to SLURM, note its number, and return sbatch's exit status."""
    try:
        sent = subprocess.run(
            command.words, env={**environment, **command.environment}, stdout=subprocess.PIPE, text=True, check=False
        )
    except FileNotFoundError:
        raise UserError("sbatch is not installed here: submit from a login node of the cluster") from None
    if sent.returncode == 0:
        number = sent.stdout.strip().partition(";")[0]
        write_whole(Path(grid.run_dir) / _JOB, number + "\n")
        print(f"array job {number}")
    return sent.returncode
