"""Train a vision-language model: `torchrun --nproc-per-node 4 -m megavlm train --recipe demo --tp 2 --pp 2`."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megavlm.command_line.commands import complaint
from megavlm.command_line.configuration import to_train
from megavlm.errors import BadNumbers, RankError, Stopped, UserError
from megavlm.programs.history import moment_of
from megavlm.programs.launch.job import note_cause, note_exit
from megavlm.programs.main import survive_lost_output
from megavlm.resilience.events import STOPPED, read_status, wait_as_spare
from megavlm.resilience.signals import listen, under_torchrun
from megavlm.train.start import dry_run, start
from megavlm.world import World, world_of

_FEWEST_FILES, _MOST_FILES = 256, 65536


def train(argv: Sequence[str], *, began: float | None = None) -> None:
    """Parse and check the options, then build and train. Heavy imports follow the check, to report mistakes quickly.

    `began` is the start time of the process, in seconds since 1970 (default: now).
    """
    began = began or time.time()
    allow_open_files()
    launched = enter_world()
    config, world = to_train(argv, launched=launched)
    if config.run.dry_run:
        return dry_run(config, world=world)
    if under_torchrun():
        refuse_retry(Path(config.run.run_dir), world=world, launched=launch_time())
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a lost peer then raises an error instead of ending the run
    survive_lost_output()
    before = read_status(Path(config.run.run_dir))
    stop = listen(parent=os.getppid() if under_torchrun() else None)
    if world < launched:
        os.environ["WORLD_SIZE"] = str(world)  # the training ranks do not count the spare ones
        rank = int(os.environ["RANK"])
        if rank == 0:
            print(f"{world} of {launched} ranks train; the others are spare", flush=True)
        if rank >= world:
            return wait_as_spare(Path(config.run.run_dir), before)

    start(config, stop, began=began)


def allow_open_files() -> None:
    """Raise this process's limit of open files to the hard limit, at most 65536. Raises UserError below 256."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = (min(limit, _MOST_FILES) if limit >= 0 else _MOST_FILES for limit in limits)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    if most < _FEWEST_FILES:  # rendezvous, data workers and the writer of checkpoints open files
        raise UserError(f"the limit of open files (ulimit -n {most}) is too low: raise it to 1024")


def enter_world() -> int:
    """Return the number of started processes; if several, set torchrun's variables whatever the launcher is."""
    world = world_of(os.environ)
    if world.world_size > 1:
        os.environ.update(world.environment())
    return world.world_size


def main(argv: Sequence[str]) -> int:
    """Train and return the exit status: 0 finished, 75 stopped by request, 2 configuration or data are wrong, 3 losses
    or gradients are bad, 71 a device computes wrongly (each reported in one line). Other errors are raised (status 1).
    """
    try:
        train(argv, began=_birth(os.getpid()))
    except Stopped as stopped:
        note_exit(STOPPED, os.environ)
        note_cause(f"stopped ({stopped}): the same command continues", os.environ)
        return STOPPED
    except UserError as error:
        note_exit(error.status, os.environ)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, RankError) or _speaks():
            line = complaint("train", error, argv)
            print(line, file=sys.stderr, flush=True)
            note_cause(line, os.environ)
        if _world_or_alone().world_size > 1:
            time.sleep(error.wait)
        return error.status
    except Exception as error:
        note_cause(f"{type(error).__name__}: {error}", os.environ)
        raise
    note_exit(0, os.environ)
    return 0


def _speaks() -> bool:
    """Return whether this rank prints the error.

    The first rank to reach the store of the run, or of torchrun's agents, prints it, because the mistake may be on one
    machine only. Without a store, or before torch is imported (all ranks then read the same), rank 0 prints it.
    """
    if "torch" in sys.modules:
        import torch.distributed as dist

        from megavlm.parallel.rendezvous import store_of_agents

        if dist.is_available():
            met = dist.is_initialized()
            store = dist.distributed_c10d._get_default_store() if met else store_of_agents()
            if store is not None:
                return store.add("megavlm/user_error", 1) == 1
    return _world_or_alone().rank == 0


def _world_or_alone() -> World:
    """Return this process's place in the world; if the environment is wrong, a world of one with the rank in RANK."""
    try:
        return world_of(os.environ)
    except UserError:
        rank = os.environ.get("RANK", "0")
        return World(int(rank) if rank.isdecimal() and len(rank) < 10 else 0)


def refuse_retry(run_dir: Path, *, world: int, launched: float) -> None:
    """Raise the mistake or bad numbers (UserError) that ended an earlier attempt of this torchrun with `world` ranks.

    `launched` is the time (of `time.time`) when torchrun started: under the same torchrun, the options are the same.
    """
    status = read_status(run_dir)
    if status.get("state") != "failed" or status.get("exit_status") not in (UserError.status, BadNumbers.status):
        return
    # status.json has whole seconds; an attempt fails much later than a second after torchrun's start
    if status.get("world") != world or (moment_of(status) or 0.0) < launched + 1:
        return
    kind = BadNumbers if status["exit_status"] == BadNumbers.status else UserError
    line = f"{status.get('reason')} (not tried again: attempt {status.get('attempt')} of this torchrun ended so)"
    error = kind(line)
    error.wait = 1.0  # nothing is imported or built, so that all ranks get here at once
    raise error


def launch_time() -> float:
    """Return the start time of torchrun, the parent process, in seconds of `time.time`; infinity if it has exited."""
    return _birth(os.getppid()) or float("inf")


def _birth(process: int) -> float | None:
    """Return the start time of a process, in seconds of `time.time`; None if it has exited."""
    import psutil

    try:
        return float(psutil.Process(process).create_time())
    except psutil.Error:
        return None
