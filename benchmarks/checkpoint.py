"""What saves and loads cost: `python benchmarks/checkpoint.py [--processes 1 2 4 8] [--quick]`.

For each number of data-parallel processes: how long training stands still for a save beside it and for one that it
waits for, how much of that is the copy into host memory, GB/s, and what verifying adds to a load.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from record import append, circumstances

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "--train-iters 1 --micro-batch-size 1 --seq-length 64 --no-tensorboard --vision-num-layers 2 "
    "--vision-hidden-size 256 "
    "--vision-ffn-hidden-size 1024 --vision-num-attention-heads 4 --vision-image-size 16 --vision-patch-size 4 "
    "--language-hidden-size 768 --language-ffn-hidden-size 2048 --language-num-attention-heads 12 "
    "--language-num-query-groups 12 --language-vocab-size 8192 --keep-checkpoints 1"
).split()
REPEAT = 3


def main(argv: Sequence[str]) -> None:
    """Measure each number of processes, print and record the figures."""
    parser = argparse.ArgumentParser(description="Measure saves, loads and the cost of verifying.")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8], help="Numbers of processes.")
    parser.add_argument("--layers", type=int, default=6, help="Language layers: 7 million parameters each.")
    parser.add_argument("--quick", action="store_true", help="A small model on one process; nothing is recorded.")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker is not None:
        return work(options.worker, layers=options.layers)
    layers, processes = (1, [1]) if options.quick else (options.layers, options.processes)
    for number in processes:
        record = {**circumstances(), "processes": number, **measure(number, layers=layers)}
        print(json.dumps(record, indent=2), flush=True)
        if not options.quick:
            append("checkpoint", record)


def measure(processes: int, *, layers: int) -> dict[str, Any]:
    """Return the figures of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += [str(Path(__file__)), "--worker", folder, "--layers", str(layers)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=environment)
        found: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text())
        return found


def work(folder: Path, *, layers: int) -> None:
    """Build a run, save and load it several times; rank 0 writes the medians."""
    from megavlm import backend

    chosen = backend.activate()
    import torch.distributed as dist

    from megavlm.checkpoint import restoring, state
    from megavlm.checkpoint.manifest import read_manifest
    from megavlm.checkpoint.staging import Staging
    from megavlm.config.cli import parse
    from megavlm.train.build import build
    from megavlm.train.loop import close

    world = int(os.environ["WORLD_SIZE"])
    argv = [*MODEL, "--global-batch-size", str(world), "--language-num-layers", str(layers), "--run-dir", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = build(parse(argv), chosen)
    run.engine.train_step(run.data_loader.next_step().batches)
    assert run.saver is not None
    saver, trained = run.saver, run.engine.trained()
    copies: list[float] = []
    copy = Staging.copy

    def timed(self: Staging, files: Any) -> Any:
        places, seconds = _timed(lambda: copy(self, files))
        copies.append(seconds)
        return places

    Staging.copy = timed  # type: ignore[method-assign]
    stalls, waits, saves = [], [], []
    for iteration in range(1, 2 * REPEAT + 3):  # the first two are warm-up: memory is touched, plans are made
        position = state.Position(iteration=iteration, loader={})
        dist.barrier()
        began = time.perf_counter()
        state.save(trained, position, config=run.config, plan=run.plan, saver=saver)
        begun = time.perf_counter() - began
        saver.wait()
        ended = time.perf_counter() - began
        (report,) = saver.poll()
        assert report.error is None, report.error
        if iteration > 2:
            stalls.append(begun)
            waits.append(ended)
            saves.append(report.seconds)
    dist.barrier()
    checkpoint = report.folder
    load = partial(state.load, trained, config=run.config, plan=run.plan)
    verified = partial(restoring.load_newest, restoring.Choices((checkpoint,)), check=_nothing, load=load, say=print)
    loads: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * REPEAT + 2):
        dist.barrier()
        seconds = _timed(verified if number % 2 else partial(load, checkpoint))[1]
        if number > 1:
            loads[number % 2 == 1].append(seconds)
    size = sum(each.bytes for each in read_manifest(checkpoint).values())
    close(run)
    if dist.get_rank() == 0:
        stall, whole, copied = (statistics.median(each) for each in (stalls, waits, copies[2:]))
        figures = {
            "gigabytes": size / 1e9,
            "copy_s": copied,
            "async_stall_s": stall,
            "sync_stall_s": whole,
            "stall_beyond_copy_of_sync": (stall - copied) / whole,
            "save_s": statistics.median(saves),
            "save_gb_per_s": size / 1e9 / statistics.median(saves),
            "load_s": statistics.median(loads[False]),
            "verified_load_s": statistics.median(loads[True]),
            "verification_of_load": statistics.median(loads[True]) / statistics.median(loads[False]) - 1,
        }
        (folder / "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _timed(action: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = action()
    return result, time.perf_counter() - began


def _nothing(folder: Path) -> None:
    """Check nothing."""


if __name__ == "__main__":
    main(sys.argv[1:])
