"""What saves and loads cost: `python benchmarks/checkpoint.py [--processes 1 2 4 8] [--quick]`.

For each number of data-parallel processes: how long training stands still for a save beside it and for one that it
waits for, how much of that is the copy into host memory, how much longer a step takes while a save is written, GB/s,
and what verifying adds to a load. Figures that end in `_cpu_s` are processor time, which other work on the machine
hardly changes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY, patch

from record import append, circumstances

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "--train-iters 1000 --micro-batch-size 1 --seq-length 64 --no-tensorboard --set model.vision.num_layers=2 "
    "model.vision.hidden_size=256 model.vision.ffn_hidden_size=1024 model.vision.num_attention_heads=4 "
    "model.vision.image_size=16 model.vision.patch_size=4 model.language.hidden_size=768 "
    "model.language.ffn_hidden_size=2048 model.language.num_attention_heads=12 "
    "model.language.num_query_groups=12 model.language.vocab_size=8192 --keep-checkpoints 1"
).split()
REPEAT = 3
STEPS = 8  # after each save; those that end before it has been written ran beside it


def main(argv: Sequence[str]) -> None:
    """Measure each number of processes, print and record the figures."""
    parser = argparse.ArgumentParser(description="Measure saves, loads and the cost of verifying.")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8], help="Numbers of processes.")
    parser.add_argument("--layers", type=int, default=6, help="Language layers: 7 million parameters each.")
    parser.add_argument("--quick", action="store_true", help="A small model on one process; nothing is recorded.")
    parser.add_argument("--no-record", action="store_true", help="Print the figures only.")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker is not None:
        return work(options.worker, layers=options.layers)
    layers, processes = (1, [1]) if options.quick else (options.layers, options.processes)
    for number in processes:
        record = {**circumstances(), "processes": number, **measure(number, layers=layers)}
        print(json.dumps(record, indent=2), flush=True)
        if not (options.quick or options.no_record):
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
    run = built(folder, layers=layers)
    import torch.distributed as dist

    from megavlm.train.loop import close

    checkpoint, saves = _saves(run)
    # Steps come last: their saves take the place of the checkpoint that is loaded.
    figures = {"layers": layers, **saves, **_loads(run, checkpoint), **_steps(run)}
    close(run)
    if dist.get_rank() == 0:
        (folder / "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def built(folder: Path, *, layers: int, flags: Sequence[str] = ()) -> Any:
    """Return a run in a folder that has trained a step."""
    from megavlm import backend

    chosen = backend.activate()
    from megavlm.command_line.parsing import parse
    from megavlm.train.build import build
    from megavlm.world import world_of

    world = world_of(os.environ).world_size
    argv = [
        *MODEL,
        "--global-batch-size",
        str(world),
        "--set",
        f"model.language.num_layers={layers}",
        "--run-dir",
        str(folder),
    ]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = build(parse([*argv, *flags]), chosen)
    run.engine.train_step(run.data_loader.next_step().batches)
    return run


def _saves(run: Any) -> tuple[Path, dict[str, float]]:
    """Save several times, beside training and waiting for it; return the last checkpoint and the medians."""
    import torch.distributed as dist

    from megavlm.checkpoint import state
    from megavlm.checkpoint.manifest import read_manifest
    from megavlm.checkpoint.staging import Staging

    saver, trained = run.saver, run.engine.trained()
    copy, copies = Staging.copy, []
    stalls, waits, written = [], [], []

    def timed(self: Staging, files: Any) -> Any:
        places, taken = spent(lambda: copy(self, files))
        copies.append(taken)
        return places

    with patch.object(Staging, "copy", timed):
        for iteration in range(1, 2 * REPEAT + 3):
            position = state.Position(iteration=iteration, loader={})
            save = partial(state.save, trained, position, config=run.config, plan=run.plan, saver=saver)
            dist.barrier()
            before = _processor_time(saver._process.pid)
            _, begun = spent(save)
            _, waited = spent(saver.wait)
            (report,) = saver.poll()
            assert report.error is None, report.error
            beside = _processor_time(saver._process.pid) - before
            stalls.append(begun)
            waits.append(Spent(begun.seconds + waited.seconds, begun.processor + waited.processor + beside))
            written.append(report.seconds)
    dist.barrier()  # the manifest is rank 0's
    stall, whole, copied = (median(each[2:]) for each in (stalls, waits, copies))  # two are warm-up
    gigabytes = sum(each.bytes for each in read_manifest(report.folder).values()) / 1e9
    seconds = statistics.median(written[2:])
    return report.folder, {
        "gigabytes": gigabytes,
        "copy_s": copied.seconds,
        "async_stall_s": stall.seconds,
        "sync_stall_s": whole.seconds,
        "stall_beyond_copy_of_sync": (stall.seconds - copied.seconds) / whole.seconds,
        "copy_cpu_s": copied.processor,
        "async_stall_cpu_s": stall.processor,
        "sync_save_cpu_s": whole.processor,
        "stall_beyond_copy_of_sync_cpu": (stall.processor - copied.processor) / whole.processor,
        "save_s": seconds,
        "save_gb_per_s": gigabytes / seconds,
    }


def _steps(run: Any) -> dict[str, float]:
    """Train while saves are written, and return the median of a step beside one and of the others, each with its
    processor time in all threads of this process.
    """
    import torch.distributed as dist

    from megavlm.checkpoint import state

    saver = run.saver
    beside, alone = [], []
    for iteration in range(101, 101 + 2 * REPEAT):
        position = state.Position(iteration=iteration, loader={})
        state.save(run.engine.trained(), position, config=run.config, plan=run.plan, saver=saver)
        dist.barrier()
        written = False
        for _ in range(STEPS):
            batches = run.data_loader.next_step().batches
            _, taken = spent(partial(run.engine.train_step, batches))
            # A step in which the save came to its end counts as neither.
            ended = written or bool(saver.poll())
            if not ended:
                beside.append(taken)
            elif written:
                alone.append(taken)
            written = ended
        saver.wait()
        saver.poll()
    if dist.get_rank() > 0:  # its own writer may have ended before rank 0's, which waits for all
        return {}
    if not (beside and alone):
        raise SystemExit(f"no step ran beside a save, or every one of {STEPS} did: change --layers")
    busy, quiet = median(beside), median(alone)
    return {
        "step_alone_s": quiet.seconds,
        "step_beside_a_save_s": busy.seconds,
        "step_beside_a_save": busy.seconds / quiet.seconds,
        "step_beside_a_save_cpu": busy.processor / quiet.processor,
        "steps_beside_a_save": len(beside),
    }


def _loads(run: Any, checkpoint: Path) -> dict[str, float]:
    """Load several times, by turns without sums and verified; return the medians."""
    import torch.distributed as dist

    from megavlm.checkpoint import reading, state

    load = partial(state.load, run.engine.trained(), config=run.config, plan=run.plan)
    verified = partial(reading.load_newest, reading.Choices((checkpoint,)), check=_nothing, load=load, say=print)
    loads: dict[bool, list[Spent]] = {False: [], True: []}
    read: dict[bool, int] = {}
    for number in range(2 * REPEAT + 2):
        verifies = number % 2 == 1
        dist.barrier()
        before = _bytes_read()
        with contextlib.nullcontext() if verifies else _without_sums():
            _, taken = spent(verified if verifies else partial(load, checkpoint))
        read[verifies] = _bytes_read() - before
        loads[verifies].append(taken)
    plain, summed = (median(loads[verifies][1:]) for verifies in (False, True))  # one of each is warm-up
    return {
        "load_s": plain.seconds,
        "verified_load_s": summed.seconds,
        "verification_of_load": summed.seconds / plain.seconds - 1,
        "verification_of_load_cpu": summed.processor / plain.processor - 1,
        "load_cpu_s": plain.processor,
        "verified_load_cpu_s": summed.processor,
        "load_bytes_read": read[False],
        "verified_load_bytes_read": read[True],
    }


@dataclass(frozen=True)
class Spent:
    """Seconds by the clock, and of the processor."""

    seconds: float
    processor: float


def spent(action: Callable[[], Any]) -> tuple[Any, Spent]:
    """Run `action` without collecting garbage: that takes 0.3 s, and would come now in one side and now in the other.

    Where a call is timed within another that is timed, only the outer one collects, and before its time begins.
    """
    outermost = gc.isenabled()
    if outermost:
        gc.collect()
        gc.disable()
    began, used = time.perf_counter(), time.process_time()
    try:
        result = action()
        return result, Spent(time.perf_counter() - began, time.process_time() - used)
    finally:
        if outermost:
            gc.enable()


def median(each: Sequence[Spent]) -> Spent:
    """Return the median of both times."""
    return Spent(statistics.median(one.seconds for one in each), statistics.median(one.processor for one in each))


def _processor_time(process: int | None) -> float:
    """Return the processor time that another process has used (proc(5), fields 14 and 15)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _bytes_read() -> int:
    """Return the bytes that this process has read, from the page cache too."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _without_sums() -> AbstractContextManager[Any]:
    """Let readers know no sums, so that a load verifies nothing."""
    from megavlm.checkpoint.manifest import FoldedSum

    return patch.multiple(FoldedSum, update=_nothing, value=property(lambda _: ANY))


def _nothing(*_: object) -> None:
    """Check nothing."""


if __name__ == "__main__":
    main(sys.argv[1:])
