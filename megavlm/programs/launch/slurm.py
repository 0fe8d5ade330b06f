"""Submit a run as one SLURM batch job of launch/slurm.sbatch."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megavlm.errors import UserError
from megavlm.programs.launch.checks import check_flags
from megavlm.programs.launch.job import Command, Job

SCRIPT = "launch/slurm.sbatch"
_OURS = ("--nodes", "-N", "--gpus-per-node")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", metavar="IMAGE", help="Container: *.sif runs in Apptainer, others in pyxis.")
    parser.add_argument(
        "--run-dir-is-shared",
        action="store_true",
        help="All nodes see --run-dir, though this machine has it on a disk.",
    )


def launch(given: argparse.Namespace, more: Sequence[str], flags: tuple[str, ...]) -> int:
    """Check a job and submit it, or print the command; return the exit status. `more` are further options of sbatch."""
    if not Path(SCRIPT).exists():
        raise UserError(f"{SCRIPT} is not here: submit from a clone of the repository")
    job = Job(given.nodes, given.gpus_per_node or 8, flags)
    check_flags(flags, job, gpu=given.gpu, shared=given.run_dir_is_shared)
    command = specification(job, more, profile=given.profile, image=given.image)
    if given.dry_run:
        print(command)
        return 0
    return submit(command)


def submit(command: Command) -> int:
    """Run sbatch; return its exit status. Raises UserError where sbatch is not installed."""
    try:
        return subprocess.run(command.words, env={**os.environ, **command.environment}, check=False).returncode
    except FileNotFoundError:
        raise UserError("sbatch is not installed here: submit from a login node of the cluster") from None


def specification(job: Job, options: Sequence[str], *, profile: str | None = None, image: str | None = None) -> Command:
    """Return the sbatch command that submits a job.

    Args:
        options: more options of sbatch, such as --time and --partition.
        profile: name of a file in launch/profiles, without its suffix.
        image: container image in which the run runs.

    Settings are passed as environment variables of sbatch: its --export would split them at commas.
    """
    for option in options:
        if option.partition("=")[0] in _OURS:
            raise UserError(f"{option.partition('=')[0]} is given twice: name nodes and GPUs before all other options")
    given = {"MEGAVLM_PROFILE": profile, "MEGAVLM_IMAGE": image, "MEGAVLM_PROCESSES": str(job.processes)}
    words = ("sbatch", f"--nodes={job.nodes}", f"--gpus-per-node={job.processes}", *options, SCRIPT, *job.flags)
    return Command(words, {name: value for name, value in given.items() if value is not None})
