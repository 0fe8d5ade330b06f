"""Processes that no torchrun started are one world, too, whatever told them their places."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from megavlm.resilience.signals import STOPPED
from megavlm.resilience.status import read_status
from tests.support.forked import start_program, status_of
from tests.support.torchrun import TINY, last_iteration
from tests.support.training import assert_same_curve, metrics, train

LIMIT = 2.0  # seconds of a collective, below


def slow_rank_0() -> str:
    import torch.distributed as dist

    from megavlm.parallel import rendezvous

    as_before = rendezvous.TorchWorld.current
    dist.destroy_process_group()
    replace(as_before, timeout=timedelta(seconds=LIMIT)).begin()
    try:
        return rendezvous.from_rank_0(lambda: time.sleep(2 * LIMIT) or "prepared", "")
    finally:
        dist.destroy_process_group()
        replace(rendezvous.TorchWorld.current, timeout=as_before.timeout).begin()


def test_what_rank_0_does_alone_may_take_longer_than_a_collective(pools):
    assert pools(2).run(slow_rank_0) == ["prepared"] * 2


BY_SRUN = {
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "1"},
    **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "here"},
}
BY_MPIRUN = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "1212", strict=True)
}


def test_two_processes_train_like_one_and_stop_like_one(pools, tmp_path: Path):
    """srun told the first of its place, mpirun the second: both find the same world."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = {"MASTER_PORT": str(taken.getsockname()[1])}
    run_dir = tmp_path / "run"
    argv = [*TINY, *"--tp 2 --train-iters 2000 --run-dir".split(), str(run_dir)]
    outputs = [tmp_path / "0", tmp_path / "1"]
    given = zip(outputs, (BY_SRUN, BY_MPIRUN), strict=True)
    ranks = [start_program(argv, output, env=env | port) for output, env in given]
    while last_iteration(run_dir) < 3:
        time.sleep(0.05)
        assert all(rank.is_alive() for rank in ranks), [output.read_text() for output in outputs]
    for rank in ranks:
        os.kill(rank.pid or 0, signal.SIGTERM)
    assert [status_of(rank) for rank in ranks] == [STOPPED] * 2, [output.read_text() for output in outputs]
    assert read_status(run_dir)["state"] == "stopped"
    done = last_iteration(run_dir)
    pools(1).run(train, [*TINY, "--train-iters", "8"], str(tmp_path / "alone"))
    both = min(done, 8)
    assert_same_curve(metrics(run_dir)[:both], metrics(tmp_path / "alone")[:both])
