"""Goodput under failures: by simulation with published failure rates, and of a real job with faults.

    python benchmarks/goodput.py simulate --gpus 1024 --stall 2 --restart 300 --detection 90
    python benchmarks/goodput.py run --minutes 20 --every 120

Failures of a job are those of `megavlm/resilience/young_daly.py`, whose formula the simulation checks.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without an installed package, too

import record

from megavlm.resilience.young_daly import LLAMA3_PER_GPU_HOUR, FailingJob


def simulated(job: FailingJob, interval: float, *, failures: int, seed: int) -> float:
    """Return the goodput over this many failures: training that a checkpoint has kept, of all time.

    Failures may come in a save, whose interval is then lost, and during detection and restart, which begin anew.
    """
    draw = random.Random(seed)
    kept = total = 0.0
    cycle = interval + job.stall
    for _ in range(failures):
        until = draw.expovariate(1 / job.between_failures)
        ready = job.detection + job.restart  # after the failure before
        total += until
        if until > ready:
            kept += (until - ready) // cycle * interval
    return kept / total


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("what", choices=("simulate", "run"), help="simulate: in seconds. run: for --minutes, on CPUs.")
    parser.add_argument("--gpus", type=int, default=1024, help="GPUs of the job; default: 1024.")
    parser.add_argument("--rate", type=float, default=LLAMA3_PER_GPU_HOUR, help="Interruptions per GPU and hour.")
    parser.add_argument("--stall", type=float, default=2.0, help="Seconds for which a save stops training; default: 2.")
    parser.add_argument("--restart", type=float, default=300.0, help="Seconds to start again; default: 300.")
    parser.add_argument(
        "--detection", type=float, default=90.0, help="Seconds until a failure ends a run; default: 90."
    )
    parser.add_argument("--failures", type=int, default=200_000, help="Failures to simulate; default: 200,000.")
    parser.add_argument("--minutes", type=float, default=20.0, help="run: minutes with faults; default: 20.")
    parser.add_argument("--every", type=float, default=120.0, help="run: seconds between faults; default: 120.")
    parser.add_argument("--hang-timeout", type=float, default=10.0, help="run: --hang-timeout of the job; default: 10.")
    parser.add_argument("--seed", type=int, default=1, help="run: of the moments and kinds of faults; default: 1.")
    parser.add_argument("--folder", type=Path, help="run: keep the files of the runs here.")
    parser.add_argument("--write", action="store_true", help="Add the result to benchmarks/records/goodput.jsonl.")
    given = parser.parse_args(argv)
    if given.what == "run":
        return _run(given)
    return _simulate(given)


def _run(given: argparse.Namespace) -> int:
    from goodput_run import compared

    circumstances = record.circumstances()
    with tempfile.TemporaryDirectory() as temporary:
        found = compared(
            given.minutes,
            every=given.every,
            seed=given.seed,
            hang_timeout=given.hang_timeout,
            folder=given.folder or Path(temporary),
        )
    print(json.dumps(found, indent=2))
    if given.write:
        record.append("goodput", {**circumstances, "run": found})
    return 0


def _simulate(given: argparse.Namespace) -> int:
    job = FailingJob(given.gpus, given.rate, given.stall, given.restart, given.detection)
    best = job.best_interval
    print(f"{job.gpus} GPUs: {job.between_failures / 3600:.1f} h between failures; save every {best:.0f} s of training")
    table = {}
    for factor in (0.25, 0.5, 1, 2, 4, 8):
        table[f"{factor * best:.0f}"] = found = simulated(job, factor * best, failures=given.failures, seed=1)
        print(f"{factor * best:8.0f} s: {found:.3%} simulated, {job.goodput(factor * best):.3%} by the formula")
    if given.write:
        record.append("goodput", {**record.circumstances(), "job": asdict(job), "interval": best, "goodput": table})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
