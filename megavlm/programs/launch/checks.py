"""Find here, in seconds, what would end a run there after hours in a queue."""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megavlm.arch.dims import dims_of
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.planner.auto import complaint
from megavlm.planner.hardware import profile
from megavlm.programs.configuration import configured
from megavlm.programs.launch.job import Job
from megavlm.rules.defaults import resolve
from megavlm.storage import is_url
from megavlm.train.source import vocab_size_of

# File systems of one machine. A folder on any other (nfs, lustre, gpfs, beegfs, ceph, wekafs, fuse.…) may be shared.
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs", "vfat", "squashfs")


def complaints(config: Config, job: Job, *, gpu: str | None, shared: bool, mounts: str) -> Iterator[str]:
    """Yield a line for each reason for which a configuration that passes its own rules cannot run as a job.

    Args:
        gpu: name of the planner's profile of the GPU; without one, memory is not checked.
        shared: whether the user says that all nodes share the run folder.
        mounts: content of /proc/self/mounts.
    """
    tp = config.parallel.tensor_model_parallel_size
    if tp > job.processes:
        yield (
            f"--tp {tp} is wider than a node of {job.processes} GPUs, and tensor parallelism needs the links within "
            f"one: use at most --tp {job.processes}, and --pp for the rest"
        )
    if job.nodes > 1 and not shared:
        kind = filesystem_of(Path(config.run.run_dir).resolve(), mounts)
        if kind in _LOCAL:
            yield (
                f"--run-dir {config.run.run_dir} is on {kind}, which other nodes do not see: choose a folder on shared "
                "storage, or say --run-dir-is-shared"
            )
    if gpu is not None and (problem := memory_complaint(config, job, gpu=gpu)):
        yield problem


def is_in(folder: str, mounts: Sequence[str]) -> bool:
    """Return whether a folder of a machine, named by its full path, is in one of these, which end with a slash."""
    return f"{posixpath.normpath(folder)}/".startswith(tuple(mounts))


def outlives_machines(config: Config, job: Job) -> bool:
    """Return whether a run may have RUN_DIR on its machine's own disk: there is one machine, and a store has copies."""
    copies = config.checkpoint.checkpoint_dir or ""
    return job.nodes == 1 and is_url(copies) and not copies.startswith("file:")


def memory_complaint(config: Config, job: Job, *, gpu: str) -> str | None:
    """Return a line if the planner estimates that a rank needs more memory than the GPU has, else None."""
    hardware = replace(profile(gpu), devices_per_node=job.processes)
    config = resolve(config, vocab_size=vocab_size_of(config))
    dims = dims_of(config, world=job.world)

    return complaint(config, dims, hardware, name=gpu)


def filesystem_of(path: Path, mounts: str) -> str:
    """Return the type of the file system that a path is on, given the content of /proc/self/mounts."""
    found = ("", "unknown")
    for line in mounts.splitlines():
        _, place, kind, *_ = line.split(" ")
        place = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), place)  # a space is written \040
        if path.is_relative_to(place) and len(place) >= len(found[0]):
            found = (place, kind)
    return found[1]


def check_flags(flags: Sequence[str], job: Job, *, gpu: str | None, shared: bool) -> None:
    """Raise UserError for the first reason for which flags of pretrain_vlm.py cannot run as a job."""
    config = configured(flags, world=job.world)
    gpu = gpu or (config.placement.hardware if config.placement.hardware != "cpu" else None)
    check_job(config, job, gpu=gpu, shared=shared)
    if gpu is None:
        print("memory is not checked: name the GPU by --gpu", file=sys.stderr)


def check_job(config: Config, job: Job, *, gpu: str | None, shared: bool) -> None:
    """Raise UserError for the first reason for which a configuration cannot run as a job."""
    mounts = Path("/proc/self/mounts")
    text = mounts.read_text() if mounts.exists() else ""
    for problem in complaints(config, job, gpu=gpu, shared=shared, mounts=text):
        raise UserError(problem)
