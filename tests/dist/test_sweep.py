"""`megavlm sweep` on this machine: variants beside one another, and the same command goes on after a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megavlm.programs.sweep.grid import read_grid, variants_of
from megavlm.programs.sweep.sweep import results
from megavlm.programs.sweep.training import state_of
from megavlm.resilience.events import STOPPED
from tests.support.forked import PATIENCE, ROOT
from tests.support.torchrun import TINY, last_iteration
from tests.support.training import metrics, train, without_wall_time

pytestmark = pytest.mark.slow


def start(grid: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megavlm", "sweep", str(grid), *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_variants_train_beside_one_another_and_go_on_after_a_signal(pools, tmp_path: Path):
    file = tmp_path / "grid.yaml"
    steps = {"train_iters": [60]}
    entries = [{"name": "slow", "lr": 0.001}, {"name": "fast", "lr": 0.004}, {"name": "wrong", "load": "nowhere"}]
    file.write_text(
        yaml.safe_dump(
            {"run_dir": str(tmp_path / "runs"), "flags": TINY, "list": entries, "product": steps, "seeds": [7]}
        )
    )
    grid = read_grid(file)
    variants = variants_of(grid)
    folder = tmp_path / "runs" / variants[0].name
    sweep = start(file, "--parallel", "3")
    end = time.monotonic() + PATIENCE
    while last_iteration(folder) < 2:
        assert sweep.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    sweep.send_signal(signal.SIGTERM)
    told, _ = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == STOPPED, told
    states = [state_of(variant) for variant in variants]
    assert states[0] == "stopped", told

    sweep = start(file, "--parallel", "2")
    told, _ = sweep.communicate(timeout=PATIENCE)
    assert [state_of(variant) for variant in variants] == ["finished", "finished", "failed"], told
    assert sweep.returncode in (0, 1), told  # 1 if the wrong one had not begun before the signal
    table, _ = results(grid, variants)
    reached = table[0].index("iteration")
    assert [row[reached] for row in table[1:]] == ["60", "60", "0"]
    assert (tmp_path / "runs/sweep.tsv").exists()
    pools(1).run(train, [*TINY, *"--lr 0.001 --train-iters 60 --seed 7 --no-save".split()], str(tmp_path / "alone"))
    assert without_wall_time(metrics(folder)) == without_wall_time(metrics(tmp_path / "alone"))

    again = start(file)
    told, _ = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, told
    assert told.startswith("0 of 3 variants are to train"), told
