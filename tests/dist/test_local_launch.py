"""`megavlm launch local`: several agents of torchrun on this machine are one run, with one exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megavlm.resilience.signals import STOPPED
from megavlm.resilience.status import read_status
from tests.support.forked import PATIENCE, ROOT
from tests.support.torchrun import TINY, last_iteration
from tests.support.training import assert_same_curve, metrics, train

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize(("flags", "status"), [("--pp 2 --train-iters 4", 0), ("--pp 2 --load nowhere", 2)])
def test_the_status_is_that_of_the_run(flags: str, status: int, tmp_path: Path):
    """The launcher returns the run's own status; torchrun would turn each failure into 1."""
    launched = start(tmp_path / "run", *flags.split())
    assert launched.wait(PATIENCE) == status, (tmp_path / "run.out").read_text()
