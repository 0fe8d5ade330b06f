"""A run that is stopped, restarted or loses a part of it goes on, and its curve is that of one never disturbed.

At awkward moments, too, what can be saved is, and nothing is left behind.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from megavlm.checkpoint import folders
from megavlm.resilience.events import STOPPED, events, read_status
from tests.support.data_files import sources_of, write_all
from tests.support.forked import start_program, status_of
from tests.support.replicas import free_ports
from tests.support.torchrun import TINY, Launched, last_iteration
from tests.support.training import metrics, of_kind, train, without_wall_time

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


TWO_RANKS = "--standalone --nproc-per-node 2 --shutdown-timeout 300".split()
ENDLESS = [*TINY, *"--train-iters 100000 --log-interval 50".split()]
EVERY = 20  # iterations between saves: the writer is found before the first of them


def saved(run_dir: Path) -> list[int]:
    """The iterations of whole checkpoints."""
    return [iteration for iteration, _ in folders.complete(run_dir / "checkpoints")]


@pytest.mark.slow
def test_sigterm_to_all_at_once_and_twice(tmp_path: Path):
    """As a scheduler that signals every process of a job, and asks again soon after."""
    with Launched([*ENDLESS, *"--tp 2".split()], tmp_path, launcher=TWO_RANKS) as run:
        run.wait_for_iteration(3)
        for _ in range(2):
            run.send(signal.SIGTERM, *run.ranks(), run.process)
            time.sleep(0.5)
        assert run.status() != 0
        assert not run.alive()
    status = read_status(tmp_path)
    assert (status["state"], status["exit_status"]) == ("stopped", STOPPED), run.output()
    assert saved(tmp_path) == [status["iteration"]]


@pytest.mark.slow
def test_a_signal_in_a_save(tmp_path: Path):
    """The save is completed, and the run ends without another step."""
    run_dir, output = tmp_path / "run", tmp_path / "output"
    process = start_program([*ENDLESS, "--save-interval", str(EVERY), "--run-dir", str(run_dir)], output)
    while last_iteration(run_dir) < 1:
        time.sleep(0.02)
        assert process.is_alive(), output.read_text()
    writer = only_child(process.pid)
    writer.suspend()
    reached = where_a_save_waits(run_dir)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.5)
    assert process.is_alive(), output.read_text()
    writer.resume()
    assert status_of(process) == STOPPED, output.read_text()
    assert (last_iteration(run_dir), read_status(run_dir)["iteration"]) == (reached, reached)
    assert saved(run_dir)[-1] == reached
    assert not writer.is_running()


def only_child(pid: int) -> psutil.Process:
    (child,) = psutil.Process(pid).children()
    return child


def where_a_save_waits(run_dir: Path) -> int:
    """Return the iteration whose save waits for the one before it, as the writer was suspended just now.

    The second save from now on does, however slow the machine is. The first one does if the writer was busy: then no
    iteration comes any more, which a machine that stands still looks like, too.
    """
    first = (last_iteration(run_dir) // EVERY + 1) * EVERY
    since, before = time.monotonic(), 0
    while (reached := last_iteration(run_dir)) < first + EVERY:
        if reached != before:
            since, before = time.monotonic(), reached
        if reached == first and time.monotonic() - since > 20:
            break
        time.sleep(0.02)
    return reached


@pytest.mark.slow
def test_ranks_workers_and_writers_of_a_torchrun_that_was_killed_save_and_end(tmp_path: Path):
    with Launched([*ENDLESS, *"--tp 2".split()], tmp_path, launcher=TWO_RANKS) as run:
        run.wait_for_iteration(3)
        assert len(run.alive()) >= 4, "two ranks, and a process for each that writes"
        run.send(signal.SIGKILL, run.process)
        assert run.status() == -signal.SIGKILL
        end = time.monotonic() + 300
        while run.alive() and time.monotonic() < end:
            time.sleep(0.2)
        assert not run.alive()
    status = read_status(tmp_path)
    assert (status["state"], status["reason"]) == ("stopped", "torchrun is gone"), run.output()
    assert saved(tmp_path) == [status["iteration"]]


@pytest.mark.slow
def test_the_folder_of_a_run_that_was_killed_is_taken_over(tmp_path: Path):
    """Its data workers and the process that writes checkpoints end with it."""
    run_dir, output = tmp_path / "run", tmp_path / "output"
    files = [*sources_of(write_all(tmp_path / "data")), *"--seq-length 96 --packing-window 16".split()]
    argv = [*ENDLESS, *files, *"--image-sizes --images-per-sample 1 --save-interval 2 --run-dir".split(), str(run_dir)]
    killed = start_program(argv, output)
    while not saved(run_dir):
        time.sleep(0.02)
        assert killed.is_alive(), output.read_text()
    children = psutil.Process(killed.pid).children(recursive=True)
    assert len(children) >= 3, "two data workers and a writer"
    killed.kill()
    killed.join()
    assert not psutil.wait_procs(children, timeout=120)[1]
    assert read_status(run_dir)["state"] == "running"
    newest = saved(run_dir)[-1]
    assert status_of(start_program([*argv, "--train-iters", str(newest + 2)], output)) == 0, output.read_text()
    (event,) = of_kind(run_dir, "takeover")
    assert event["reason"].startswith(f"process {killed.pid} ")
    starts = [event["iteration"] for event in of_kind(run_dir, "start")]
    assert starts[0] == 0
    assert starts[1] >= newest


@pytest.mark.slow
def test_a_mistake_is_not_built_again_by_a_torchrun_that_restarts(tmp_path: Path):
    """It cannot be told not to; each of its attempts says the line and ends."""
    argv = [*TINY, *"--tp 2 --load".split(), str(tmp_path / "nowhere")]
    launcher = "--standalone --nproc-per-node 2 --max-restarts 2".split()
    with Launched(argv, tmp_path / "run", launcher=launcher) as run:
        assert run.status() == 1
    lines = [line for line in run.output().splitlines() if line.startswith("pretrain_vlm.py: ")]
    assert len(lines) == 3, run.output()
    assert str(tmp_path / "nowhere") in lines[0]
    assert [line.endswith("(not tried again: attempt 0 of this torchrun ended so)") for line in lines] == [0, 1, 1]
    assert (read_status(tmp_path / "run")["exit_status"], read_status(tmp_path / "run")["attempt"]) == (2, 0)
    assert [event["kind"] for event in events(tmp_path / "run")] == ["failure"]
