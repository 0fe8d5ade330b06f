"""Measure how long the demo takes, how many of its answers are right, and how long it waits for data.

    python benchmarks/demo.py [--tp 2] [--pp 2]

Runs `--recipe demo` as `make demo` does, in a temporary folder, and appends to `records/demo.jsonl`: the seconds from
start to end, the shares of right answers to "which digits" with the images and with shuffled ones, and the share of
the training time in which a step waits for data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    arguments = parser.parse_args()
    circumstances = record.circumstances()
    with tempfile.TemporaryDirectory() as folder:
        seconds = run(arguments.tp, arguments.pp, folder)
        figures = {"seconds": seconds, **right_answers(Path(folder)), "waiting_for_data": waiting(Path(folder))}
    print(figures)
    record.append("demo", {**circumstances, "arguments": vars(arguments), **figures})


def run(tp: int, pp: int, folder: str) -> float:
    """Return the seconds that the demo takes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(tp * pp), "pretrain_vlm.py"]
    flags = ["--recipe", "demo", "--tp", str(tp), "--pp", str(pp), "--run-dir", folder]
    began = time.perf_counter()
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run([*launch, *flags], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def right_answers(folder: Path) -> dict[str, float]:
    """Return the shares of right answers that the last evaluation wrote into its table."""
    lines = (folder / "evaluation.txt").read_text(encoding="utf-8").splitlines()
    *_, right, shuffled, _ = next(line for line in lines if line.startswith("which digits")).split()
    return {"right": float(right.rstrip("%")) / 100, "right_shuffled": float(shuffled.rstrip("%")) / 100}


def waiting(folder: Path) -> float:
    """Return the share of the steps' time in which they wait for data."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return sum(step["data_time_s"] for step in steps) / sum(step["step_time_s"] for step in steps)


if __name__ == "__main__":
    main()
