"""Signals, kills and second runs at awkward moments: what can be saved is, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from megavlm.checkpoint import folders
from megavlm.resilience.events import events
from megavlm.resilience.status import STOPPED, read_status
from tests.support.data_files import sources_of, write_all
from tests.support.forked import start_program, status_of
from tests.support.torchrun import TINY, Launched, last_iteration
from tests.support.training import of_kind

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
