"""A rank that stops: the run ends by itself within a minute, and names that rank and not one that waits for it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megavlm.resilience.events import events
from tests.support.torchrun import TINY, Launched

LAUNCHER = "--standalone --nproc-per-node 2".split()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_is_named(stopped: int, tmp_path: Path):
    argv = [*TINY, *"--tp 2 --train-iters 3000 --hang-timeout 20 --no-save".split()]
    with Launched(argv, tmp_path, launcher=LAUNCHER) as run:
        run.wait_for_iteration(12)
        run.send(signal.SIGSTOP, run.ranks()[stopped])
        assert run.status() == 1, run.output()
        assert not run.alive()
    assert f"the run hangs: rank {stopped} (" in run.output()
    assert "its process does not answer" in run.output()
    (event,) = [each for each in events(tmp_path) if each["kind"] == "hang"]
    assert event["stopped_rank"] == stopped
    stacks = tmp_path / event["stacks"] / f"rank-{1 - stopped}.txt"
    assert "train_step" in stacks.read_text()
    assert not (tmp_path / event["stacks"] / f"rank-{stopped}.txt").exists()
    assert f"no stacks of rank {stopped}" in (tmp_path / event["stacks"] / "README.txt").read_text()
