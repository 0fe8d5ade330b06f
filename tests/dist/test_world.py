"""Processes that no torchrun started are one world, too, whatever told them their places."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from megavlm.resilience.events import read_status
from megavlm.resilience.signals import STOPPED
from tests.support.forked import PATIENCE, ROOT, start_program, status_of
from tests.support.replicas import free_ports
from tests.support.torchrun import TINY, Launched, last_iteration
from tests.support.training import assert_same_curve, metrics, of_kind, train

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


@pytest.mark.slow
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


def start(run_dir: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "megavlm", "launch", "local", "--nodes", "2", "--gpus-per-node", "1", "--"]
    with run_dir.with_suffix(".out").open("wb") as output:
        return subprocess.Popen(
            [*command, *TINY, *flags, "--run-dir", str(run_dir)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=output,
        )


@pytest.mark.slow
def test_two_agents_train_like_one_process_and_stop_by_one_signal(pools, tmp_path: Path):
    run_dir, output = tmp_path / "run", tmp_path / "run.out"
    launched = start(run_dir, *"--pp 2 --train-iters 3000".split())
    while last_iteration(run_dir) < 8:
        assert launched.poll() is None, output.read_text()
        time.sleep(0.1)
    launched.send_signal(signal.SIGUSR1)
    assert launched.wait(PATIENCE) == STOPPED, output.read_text()
    assert read_status(run_dir)["state"] == "stopped"
    pools(1).run(train, [*TINY, "--train-iters", "8"], str(tmp_path / "alone"))
    assert_same_curve(metrics(run_dir)[:8], metrics(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "status"), [("--pp 2 --train-iters 4", 0), ("--pp 2 --load nowhere", 2)])
def test_the_status_is_that_of_the_run(flags: str, status: int, tmp_path: Path):
    """The launcher ends with the status of the run, where torchrun alone would end with 1 for each failure."""
    launched = start(tmp_path / "run", *flags.split())
    assert launched.wait(PATIENCE) == status, (tmp_path / "run.out").read_text()


ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.slow
def test_agents_join_die_and_leave(pools, tmp_path: Path):
    """Each change costs the steps since the last checkpoint; the curve is that of one process."""
    argv = [*TINY, *"--train-iters 100000 --lr-decay-iters 4000 --save-interval 10 --log-interval 10".split()]
    run_dir = tmp_path / "run"
    port = free_ports(1)[0]

    def agent() -> Launched:
        launcher = (
            f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 20 --rdzv-backend c10d --rdzv-endpoint localhost:{port} "
            "--rdzv-id job --rdzv-conf last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5 "
            "--shutdown-timeout 120"
        )
        return Launched(argv, run_dir, launcher=launcher.split(), env=ENV)

    def worlds() -> list[int]:
        return [event["world"] for event in of_kind(run_dir, "start")]

    with agent() as first:
        first.wait_for_iteration(12)
        with agent() as dies:
            first.wait_for(lambda: worlds() == [1, 2])
            wait_for_more(first, run_dir)
            first.send(signal.SIGKILL, dies.process, *dies.ranks())
            first.wait_for(lambda: worlds() == [1, 2, 1])
        wait_for_more(first, run_dir)
        with agent() as leaves:
            first.wait_for(lambda: worlds() == [1, 2, 1, 2])
            wait_for_more(first, run_dir)
            first.send(signal.SIGTERM, leaves.process)
            leaves.status()
            assert not leaves.alive()
            first.wait_for(lambda: worlds() == [1, 2, 1, 2, 1])
        wait_for_more(first, run_dir)
        first.send(signal.SIGTERM, first.process)
        first.status()
    reached = last_iteration(run_dir)
    undisturbed = [*argv, "--train-iters", str(reached), "--no-save", "--save-interval", "0"]
    pools(1).run(train, undisturbed, str(tmp_path / "undisturbed"))
    assert_same_curve(metrics(run_dir), metrics(tmp_path / "undisturbed"))


def wait_for_more(run: Launched, run_dir: Path) -> None:
    """Wait for some steps more."""
    run.wait_for_iteration(last_iteration(run_dir) + 12)
