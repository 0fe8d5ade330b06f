"""Describe a run as a batch job of SLURM: one sbatch of launch/slurm.sbatch."""

from __future__ import annotations

from collections.abc import Sequence

from megavlm.errors import UserError
from megavlm.launch.job import Command, Job

SCRIPT = "launch/slurm.sbatch"
_OURS = ("--nodes", "-N", "--gpus-per-node")


def specification(job: Job, options: Sequence[str], *, profile: str | None = None, image: str | None = None) -> Command:
    """Return the command that submits a job.

    Args:
        options: more options of sbatch, such as --time and --partition.
        profile: name of a file in launch/profiles, without its suffix.
        image: container image in which the run runs.

    Settings travel as variables of sbatch itself: its --export would split them at commas.
    """
    for option in options:
        if option.partition("=")[0] in _OURS:
            raise UserError(f"{option.partition('=')[0]} is given twice: name nodes and GPUs before all other options")
    given = {"MEGAVLM_PROFILE": profile, "MEGAVLM_IMAGE": image, "MEGAVLM_PROCESSES": str(job.processes)}
    words = ("sbatch", f"--nodes={job.nodes}", f"--gpus-per-node={job.processes}", *options, SCRIPT, *job.flags)
    return Command(words, {name: value for name, value in given.items() if value is not None})
