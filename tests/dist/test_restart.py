"""A run that is stopped, restarted or loses a part of it goes on, and its curve is that of one never disturbed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megavlm.resilience.events import events
from megavlm.resilience.status import STOPPED, read_status
from tests.support.data_files import sources_of, write_all
from tests.support.forked import start_program, status_of
from tests.support.replicas import free_ports
from tests.support.torchrun import TINY, Launched, last_iteration
from tests.support.training import metrics, train, without_wall_time

RUN = [*TINY, *"--tp 2 --train-iters 24 --save-interval 4".split()]


@pytest.fixture(scope="module")
def undisturbed(run_once) -> Path:
    return run_once(2, RUN)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["--standalone", "--master-port 0", "--rdzv-backend c10d"])
def test_a_rank_that_dies_costs_no_iteration(launcher: str, undisturbed: Path, tmp_path: Path):
    """Static and dynamic rendezvous keep their store differently."""
    here = launcher.replace("port 0", f"port {free_ports(1)[0]}")
    argv = f"{here} --nproc-per-node 2 --max-restarts 2".split()
    with Launched(RUN, tmp_path / "run", launcher=argv) as run:
        for iteration in (6, 14):
            run.wait_for_iteration(iteration)
            run.send(signal.SIGKILL, run.ranks()[1])
        assert run.status() == 0, run.output()
    assert without_wall_time(metrics(tmp_path / "run")) == without_wall_time(metrics(undisturbed))


@pytest.mark.slow
def test_data_workers_that_are_lost_cost_nothing(pools, tmp_path: Path):
    """One is killed, and one is stopped for good."""
    files = [*TINY, *sources_of(write_all(tmp_path / "data")), *"--image-sizes --images-per-sample 1".split()]
    files += "--train-iters 60 --seq-length 96 --packing-window 16".split()
    pools(1).run(train, [*files, "--num-workers", "0"], str(tmp_path / "undisturbed"))
    with Launched([*files, "--data-worker-timeout", "5"], tmp_path / "run", launcher=None) as run:
        for number, iteration in ((signal.SIGKILL, 5), (signal.SIGSTOP, 20)):
            run.wait_for_iteration(iteration)
            run.send(number, run.workers()[0])
        assert run.status() == 0, run.output()
    assert without_wall_time(metrics(tmp_path / "run")) == without_wall_time(metrics(tmp_path / "undisturbed"))
    assert [event["kind"] for event in events(tmp_path / "run")].count("worker") == 2


def test_a_stopped_run_says_so_and_goes_on(tmp_path: Path):
    """And no second run writes to its folder meanwhile."""
    run_dir, output = tmp_path / "run", tmp_path / "output"
    argv = [*TINY, "--train-iters", "2000", "--run-dir", str(run_dir)]
    first = start_program(argv, output)
    while last_iteration(run_dir) < 2:
        time.sleep(0.05)
        assert first.is_alive(), output.read_text()
    assert status_of(start_program(argv, tmp_path / "second")) == 2
    assert f"process {first.pid}" in (tmp_path / "second").read_text()
    os.kill(first.pid, signal.SIGUSR1)
    os.kill(first.pid, signal.SIGTERM)
    assert status_of(first) == STOPPED, output.read_text()
    status = read_status(run_dir)
    assert (status["state"], status["reason"]) == ("stopped", "SIGTERM received")
    stopped = status["iteration"]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"iter_{stopped:07d}"]
    finished = start_program([*argv, "--train-iters", str(stopped + 2)], output)
    assert status_of(finished) == 0, output.read_text()
    assert read_status(run_dir)["state"] == "finished"
    kinds = [event["kind"] for event in events(run_dir)]
    assert kinds == ["start", "started", "save", "stop", "start", "started", "save", "finish"]


def fail_in_a_replica(argv: list[str], run_dir: str, late: bool) -> str:
    """Let the data of the second replica fail at the fourth step; return the error of this rank.

    `late`: they fail after the third update, which must not have to wait for them.
    """
    from threading import Event
    from unittest.mock import patch

    import torch.distributed as dist

    from megavlm.data.loader import RankLoader
    from megavlm.errors import UserError
    from megavlm.optim.chained import MeanGradientOptimizer

    made, updates, third = [], [], Event()
    make, update = RankLoader._make, MeanGradientOptimizer.update

    def failing(self, state):
        made.append(state)
        if len(made) == 4 and dist.get_rank() == 1:
            assert not late or third.wait(60), "the update waits for the data"
            raise UserError("these data are spoilt")
        return make(self, state)

    def counted(self, **kwargs):
        update(self, **kwargs)
        updates.append(1)
        if len(updates) == 3:
            third.set()

    with (
        patch.object(RankLoader, "_make", failing),
        patch.object(MeanGradientOptimizer, "update", counted),
        pytest.raises(UserError) as raised,
    ):
        train(argv, run_dir)
    return str(raised.value)


@pytest.mark.parametrize("late", [False, True])
def test_data_that_fail_in_one_replica_end_all_after_a_save(pools, tmp_path: Path, late: bool):
    assert pools(2).run(fail_in_a_replica, TINY, str(tmp_path), late) == ["these data are spoilt"] * 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iter_0000003"]
    assert read_status(tmp_path)["state"] == "failed"
