"""Measure the processor time that data take in a training process, by thread, and in its data workers.

    python benchmarks/data_threads.py [--workers 0 1 2] [--only LLaVA] [--keep]

A process reads the JPEG files of `gpu_vlm.py` as a run does, patches in bf16, and waits until each step is prefetched;
nothing is trained. Its main thread is the one that would launch kernels: what other threads compute meanwhile takes
Python's lock from it. Processor time is the scheduler's, in nanoseconds; threads of gloo, which wake up by the clock,
are left out. `--keep` appends to `benchmarks/records/data_threads.jsonl`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS = 16
Seconds = dict[int, float]  # processor time of each thread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="values of --num-workers")
    parser.add_argument("--only", default="", help="measure only models whose name contains this")
    parser.add_argument("--keep", action="store_true", help="append the figures to the records")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "WORKERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.child[0], int(options.child[1]))), flush=True)
        os._exit(0)
    from record import append, circumstances

    record: dict[str, Any] = {**circumstances(), "results": []}
    print("milliseconds of processor time a step: threads beside the main one; all processes, per image")
    for model in (name for name in ("LLaVA", "Qwen2.5-VL") if options.only in name):
        for workers in options.workers:
            found = child(model, workers)
            record["results"].append(found)
            threads = ", ".join(f"{name} {1000 * spent:.2f}" for name, spent in found["threads"].items())
            print(f"{model:11} --num-workers {workers}  {threads}; {1000 * found['per_image']:.1f}", flush=True)
    if options.keep:
        append("data_threads", record)


def child(model: str, workers: int) -> dict[str, Any]:
    """Measure in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--child", model, str(workers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(model: str, workers: int) -> dict[str, Any]:
    """Return the processor seconds of a step by thread, and those of an image in all processes."""
    import gpu_model
    from gpu_files import SAMPLES, flags_of

    from megavlm import backend

    active = backend.activate()
    from megavlm.arch.dims import dims_of
    from megavlm.data.loaders import build_loaders
    from megavlm.model.specs import DTYPES
    from megavlm.parallel.groups import build_groups
    from megavlm.parallel.rendezvous import start
    from megavlm.rules.defaults import resolve
    from megavlm.train.build_source import build_source

    shape = next(shape for shape in gpu_model.shapes(small=False) if shape.name.startswith(model))
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{flags_of(shape, Path(folder))} --num-workers {workers} --run-dir {folder}/run"
        config = resolve(gpu_model.run_config(shape.without_image_token(), precision="bf16", flags=flags))
        start(active, timeout_minutes=5)
        groups = build_groups(dims_of(config, world=1), tied_owners=(), seed=1, timeout_minutes=5)
        source = build_source(config, run_dir=Path(config.run.run_dir), rank=0, barrier=lambda: None)
        loader = build_loaders(
            config, source, groups, device=active.device, dtype=DTYPES[config.precision.dtype], vision_group=groups.tp
        ).training

        def step() -> int:
            """Take the data of a step; return its number of images."""
            images = sum(batch.image_sizes.num_images for batch in loader.next_step().batches)
            while not loader.is_ahead():
                time.sleep(0.01)
            return images

        for _ in range(SAMPLES // len(shape.images)):  # until a window has been read
            step()
        gc.collect()
        before, theirs = spent(os.getpid()), -in_workers()
        images = sum(step() for _ in range(STEPS))
        mine, theirs = spent(os.getpid()), theirs + in_workers()
        names = {thread.native_id: thread.name.rpartition("_")[0] or thread.name for thread in threading.enumerate()}
        threads: dict[str, float] = defaultdict(float)
        for number, seconds in mine.items():
            threads[names.get(number, "")] += (seconds - before.get(number, 0.0)) / STEPS
        main, _ = threads.pop(threading.main_thread().name), threads.pop("", None)
        loader.close()
    whole = theirs + STEPS * (main + sum(threads.values()))
    return {"model": shape.name, "workers": workers, "threads": threads, "per_image": whole / images}


def spent(process: int) -> Seconds:
    """Return the processor time of the threads of a process that live."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return {int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks}


def in_workers() -> float:
    """Return the processor time of this process's children."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return sum(sum(spent(int(each)).values()) for each in children)


if __name__ == "__main__":
    main()
