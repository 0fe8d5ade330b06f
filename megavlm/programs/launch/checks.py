"""Check a job before submission, in seconds, for mistakes that would end it after hours in a queue."""

from __future__ import annotations

import argparse
import posixpath
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megavlm.command_line.configuration import configured
from megavlm.command_line.parsing import parse
from megavlm.config.messages import plain
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.metrics.secrets import without_secrets
from megavlm.programs.launch.job import Job
from megavlm.train.start import memory_complaint

PROFILES = Path("launch/profiles")
# File systems of one machine. A folder on any other (nfs, lustre, gpfs, beegfs, ceph, wekafs, fuse.…) may be shared.
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs", "vfat", "squashfs")


def add_check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", help="Check memory by the planner's estimate for this GPU: h100, a100, …")
    parser.add_argument("--profile", metavar="NAME", help="Settings for the network: a file of launch/profiles.")


def complaints(config: Config, job: Job, *, gpu: str | None, shared: bool) -> Iterator[str]:
    """Yield a line for each reason why a valid configuration cannot run as this job.

    Args:
        gpu: name of the planner's profile of the GPU; with None, memory is not checked.
        shared: whether the user says that all nodes share the run folder.
    """
    tp = config.parallel.tensor_model_parallel_size
    if tp > job.processes:
        yield (
            f"--tp {tp} is wider than a node of {job.processes} GPUs, and tensor parallelism needs the links within "
            f"one: use at most --tp {job.processes}, and --pp for the rest"
        )
    if job.nodes > 1 and not shared:
        kind = filesystem_of(Path(config.run.run_dir).resolve())
        if kind in _LOCAL:
            yield (
                f"--run-dir {config.run.run_dir} is on {kind}, which other nodes do not see: choose a folder on shared "
                "storage, or say --run-dir-is-shared"
            )
    if gpu is not None and (
        problem := memory_complaint(config, world=job.world, devices_per_node=job.processes, gpu=gpu)
    ):
        yield problem


def is_in(folder: str, mounts: Sequence[str]) -> bool:
    """Return whether a folder, given by its full path, is in one of the mounts, each of which ends with a slash."""
    return f"{posixpath.normpath(folder)}/".startswith(tuple(mounts))


def filesystem_of(path: Path) -> str:
    """Return the type of the file system that a path is on."""
    import psutil

    mounts = [each for each in psutil.disk_partitions(all=True) if path.is_relative_to(each.mountpoint)]
    return max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else "unknown"


def check_flags(flags: Sequence[str], job: Job, *, gpu: str | None, shared: bool, elsewhere: bool = False) -> None:
    """Raise UserError for the first reason why a run with these options of pretrain_vlm.py cannot run as a job.

    If it runs `elsewhere`, memory is not checked where that needs files that are not here, such as a tokenizer's.
    """
    config = configured(flags, world=job.world)
    gpu = gpu or (config.placement.hardware if config.placement.hardware != "cpu" else None)
    lacking = "name the GPU by --gpu" if gpu is None else ""
    if gpu is not None and elsewhere:
        try:
            memory_complaint(config, world=job.world, devices_per_node=job.processes, gpu=gpu)
        except UserError as error:
            gpu, lacking = None, str(error)
    check_job(config, job, gpu=gpu, shared=shared)
    if lacking:
        print(f"memory is not checked: {lacking}", file=sys.stderr)


def checked(
    options: argparse.Namespace,
    flags: Sequence[str],
    place: Callable[[str], str | None],
    own: Callable[[Config, Job, argparse.Namespace], Iterator[str]],
    *,
    gpus: int = 8,
) -> tuple[Job, str | None]:
    """Return a checked job of containers, and the file of --config that has to be copied to its machines, if any.

    `place` returns the path for a file of --config on the machines; `own` yields the platform's own complaints. Raises
    UserError for the first reason why the job cannot run. A dry run hides the secrets in `options.variables`.
    """
    changed, file = moved_config(flags, place)
    job = Job(options.nodes, options.gpus_per_node or gpus, changed)
    for problem in own(parse(flags), job, options):
        raise UserError(problem)
    if not options.skip_checks:
        check_flags(flags, job, gpu=options.gpu, shared=True, elsewhere=True)
    if options.dry_run:
        options.variables = without_secrets(options.variables)
    return job, file


def check_job(config: Config, job: Job, *, gpu: str | None, shared: bool) -> None:
    """Raise UserError for the first reason why a configuration cannot run as a job."""
    for problem in complaints(config, job, gpu=gpu, shared=shared):
        raise UserError(problem)


def read_profile(name: str | None) -> Mapping[str, str]:
    """Return the variables of a profile in launch/profiles; empty for None. Raises UserError for an unknown name."""
    if name is None:
        return {}
    if not PROFILES.is_dir():
        raise UserError(f"--profile needs {PROFILES}, which a clone of the repository has: run this there")
    path = PROFILES / f"{name}.env"
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in PROFILES.glob("*.env")))
        raise UserError(f"--profile {name} is not in {PROFILES}: choose one of {known}")
    try:  # as the shell reads it (launch/slurm.sbatch)
        return dict(word.split("=", 1) for word in shlex.split(path.read_text(encoding="utf-8"), comments=True))
    except (OSError, ValueError) as error:
        raise UserError(f"--profile {name}: {path} must have lines NAME=VALUE for a shell: {error}") from error


def pairs(option: str, given: list[str]) -> dict[str, str]:
    """Return the values of a repeatable option NAME=VALUE by name. Raises UserError for any other form."""
    for each in given:
        name, equals, _ = each.partition("=")
        if not name or not equals:
            raise UserError(f"{option} {plain(each)} must be NAME=VALUE")
        if option == "--env" and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--env {plain(name)} is no name of a variable: use letters, digits and _ only")
    return dict(each.split("=", 1) for each in given)


def moved_config(flags: Sequence[str], place: Callable[[str], str | None]) -> tuple[tuple[str, ...], str | None]:
    """Return the flags with the path of --config on the job's machines, and the file to copy to them, if any.

    `place` returns the path on the machines for a local path; None for a file that is not copied.
    """
    changed = list(flags)
    for number, word in enumerate(changed):
        flag, equals, path = word.partition("=")
        if flag != "--config" or (not equals and number + 1 == len(changed)):
            continue
        path = path if equals else changed[number + 1]
        if (inside := place(path)) is not None:
            changed[number + (not equals)] = f"--config={inside}" if equals else inside
            return tuple(changed), path
    return tuple(changed), None
