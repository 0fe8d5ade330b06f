"""Compare the planner's step times with measured ones: `python benchmarks/planner.py --profile mine.json`.

Two processes run every configuration, one thread each, in rounds of different order, because a machine's speed drifts.
The profile comes from `megavlm calibrate` on this machine with as many processes. Prints predicted beside
measured, the median error, and how far from the fastest measured case the planner's choice is.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import append, circumstances

MODEL = (
    "--global-batch-size 8 --micro-batch-size 1 --seq-length 256 --no-tensorboard --no-save --data synthetic --lr 1e-5 "
    "--set model.vision.num_layers=6 model.vision.hidden_size=256 model.vision.ffn_hidden_size=1024 "
    "model.vision.num_attention_heads=4 model.vision.image_size=96 model.vision.patch_size=8 "
    "model.language.num_layers=6 model.language.hidden_size=384 model.language.ffn_hidden_size=1152 "
    "model.language.num_attention_heads=6 model.language.vocab_size=4096 --images-per-sample 1"
)
CASES = {
    "dp2": "",
    "dp2 mbs2": "--mbs 2",
    "dp2 mbs4": "--mbs 4",
    "dp2 full": "--recompute-granularity full",
    "dp2 frozen vision": "--freeze vision",
    "dp2 colocated": "--placement colocated",
    "tp2": "--tp 2",
    "tp2 mbs4": "--tp 2 --mbs 4",
    "tp2 colocated": "--tp 2 --placement colocated",
    "pp2": "--pp 2",
    "pp2 mbs2": "--pp 2 --mbs 2",
    "pp2 full": "--pp 2 --recompute-granularity full",
    "pp2 encoder first": "--pp 2 --pipeline-cuts 9",
    "pp2 late cut": "--pp 2 --pipeline-cuts 13",
    "pp2 vpp2": "--pp 2 --vpp 2",
    "pp2 colocated": "--pp 2 --placement colocated",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", required=True, metavar="FILE.json")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each configuration in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.steps, arguments.rounds)
    before = circumstances()
    guesses = {name: predicted(flags, arguments.profile) for name, flags in CASES.items()}
    measured = run_workers(arguments)
    rows = {name: (guess, measured[name]) for name, guess in guesses.items()}
    print(f"{'case':<22}{'predicted s':>13}{'measured s':>13}{'error':>9}")
    for name, (guess, real) in rows.items():
        print(f"{name:<22}{guess:>13.3f}{real:>13.3f}{guess / real - 1:>+9.0%}")
    errors = [abs(guess / real - 1) for guess, real in rows.values()]
    trained_alike = {name: row for name, row in rows.items() if "frozen" not in name}
    choice = min(trained_alike, key=lambda name: trained_alike[name][0])
    best = min(trained_alike, key=lambda name: trained_alike[name][1])
    off = trained_alike[choice][1] / trained_alike[best][1] - 1
    print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    print(f"choice: {choice}, {off:.1%} slower than the fastest measured ({best})")
    append(
        "planner",
        {
            **before,
            "profile": json.loads(Path(arguments.profile).read_text()),
            "seconds": {name: {"predicted": guess, "measured": real} for name, (guess, real) in rows.items()},
            "median_error": statistics.median(errors),
            "choice": choice,
            "slower_than_fastest": off,
        },
    )


def run_workers(arguments: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, "--worker"]
    command += ["--profile", arguments.profile, "--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def config_of(flags: str) -> Any:
    from megavlm.command_line.parsing import parse
    from megavlm.rules.defaults import resolve

    return resolve(parse([*MODEL.split(), *flags.split()]))


def predicted(flags: str, profile_name: str) -> float:
    from megavlm.arch.dims import dims_of
    from megavlm.planner.auto import predict
    from megavlm.planner.hardware import profile

    config = config_of(flags)
    return predict(config, dims_of(config, world=2), profile(profile_name)).seconds


def worker(steps: int, rounds: int) -> None:
    """Run every configuration on this world, `rounds` times; rank 0 prints the median step times as JSON."""
    from dataclasses import replace

    from megavlm import backend as backends

    backend = backends.activate()
    import torch.distributed as dist

    from megavlm.parallel.groups import destroy_groups
    from megavlm.rules.check import check
    from megavlm.train.build import build
    from megavlm.train.loop import close

    shuffle = random.Random(1).shuffle
    order: list[str] = []
    for _ in range(rounds):
        names = list(CASES)
        shuffle(names)
        order += names
    times: dict[str, list[float]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for name in order:
            config = config_of(CASES[name])
            config = replace(config, run=replace(config.run, run_dir=folder))
            check(config, world=2)
            destroy_groups()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                run = build(config, backend)
            for step in range(steps + 1):
                batches = run.data_loader.next_step().batches
                dist.barrier()
                start = time.perf_counter()
                run.engine.train_step(batches)
                if step:
                    times[name].append(time.perf_counter() - start)
            close(run)
    if dist.get_rank() == 0:
        print(json.dumps({name: statistics.median(values) for name, values in times.items()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
