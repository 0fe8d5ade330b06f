"""Benchmarks run whole, small: a record that nobody can make again is no record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNS = [
    "cpu_step.py --quick",
    "uploads.py --quick --store file://{folder}",
    "loss_memory.py --quick",
    "video.py --quick",
    "context.py --quick",
    "experts.py --quick",
    "schedules.py --quick",
    "optimizers.py --quick",
    "contrastive.py --quick",
    "placement.py --dry --rounds 1 --steps 1 --only frozen",
    "placement.py --dry --rounds 1 --steps 1 --only 112",
]


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_a_benchmark_runs_to_its_end(command: str, tmp_path: Path) -> None:
    script, *flags = command.format(folder=tmp_path).split()
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *flags], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
