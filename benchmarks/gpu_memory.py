"""Measure on one GPU what the planner's reserve must hold: a process's context and NCCL's communicators; then a run.

    python benchmarks/gpu_memory.py --out FILE.json                              # ranks share the GPU: docs/gpu.md
    CUDA_VISIBLE_DEVICES= python benchmarks/gpu_memory.py --device cpu --small   # the same code over gloo

Two processes make groups, one after the other; each sends a message, and the device's free memory is read after it.
Then the program trains three steps of a model with a billion parameters, saves, and resumes; the device's memory is
what nvidia-smi says before, at most during, and after the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import gpu_model
from record import circumstances

ROOT = Path(__file__).parents[1]
GROUPS = 8
_QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0")


def main() -> None:
    options = parsed()
    found: dict[str, Any] = {**circumstances(), "arguments": vars(options)}
    for name, measured in (("communicators", communicators), ("runs", lambda: runs(options))):
        try:
            found[name] = measured()
        except Exception as error:  # the other is measured all the same
            found[name] = {"error": f"{type(error).__name__}: {error}"[-2000:]}
        print(json.dumps({name: found[name]}), flush=True)
        if options.out is not None:
            Path(options.out).write_text(json.dumps(found, indent=1))
    if any("error" in found[name] for name in ("communicators", "runs")):
        raise SystemExit(1)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a toy in place of a model with a billion parameters")
    parser.add_argument("--layers", type=int, default=2, help="language layers of LLaVA-1.5-7B; default: 2")
    parser.add_argument("--out", metavar="FILE.json", help="write the figures to this file")
    return parser.parse_args()


def communicators() -> dict[str, Any]:
    """Return the MiB of the device that are used after each step of two ranks that share it; None without a device."""
    from tests.support.pool import Pool

    used = {"before": used_mib()}
    pool = Pool(2)
    try:
        used["two processes in one world"] = used_mib()
        used |= pool.run(_make_groups)[0]
    finally:
        pool.close()
    return used


def _make_groups() -> dict[str, int | None]:
    """Make groups of both ranks; return the MiB used after the first message of the world's and of each."""
    import torch
    import torch.distributed as dist

    device = "cuda" if torch.cuda.is_available() else "cpu"
    number, used = torch.ones(1, device=device), {}
    dist.all_reduce(number)
    used["the world's first message"] = _used_here()
    for count in range(1, GROUPS + 1):
        group = dist.new_group([0, 1])
        dist.all_reduce(number, group=group)
        used[f"{count} more groups"] = _used_here()
    return used


def _used_here() -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def used_mib() -> int | None:
    """Return the MiB of the first device that are used; None without nvidia-smi."""
    if shutil.which(_QUERY[0]) is None:
        return None
    said = subprocess.run(_QUERY, capture_output=True, text=True, check=False).stdout
    return int(said) if said.strip().isdigit() else None


def runs(options: argparse.Namespace) -> dict[str, Any]:
    """Return what three steps with a save, and the run that goes on from it, took and needed."""
    from megavlm.rules.load import to_yaml

    shape = gpu_model.shapes(small=options.small)[0]
    shape = shape if options.small else shape.with_layers(options.layers)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        precision = "fp32" if options.device == "cpu" else "bf16"
        config.write_text(to_yaml(gpu_model.run_config(shape, precision=precision)))
        run = Path(folder) / "run"
        for name, steps in (("three steps and a save", 3), ("resumed, to step 5", 5)):
            flags = f"--train-iters {steps} --save-interval 3 --data synthetic --no-tensorboard --global-batch-size 2"
            words = [sys.executable, "pretrain_vlm.py", "--config", str(config), *flags.split(), "--run-dir", str(run)]
            found[name] = _watched(words)
            found[name]["metrics"] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        saved = [file for file in (run / "checkpoints" / "iter_0000003").rglob("*") if file.is_file()]
        found["bytes of the checkpoint"] = sum(file.stat().st_size for file in saved)
    return found


def _watched(words: list[str]) -> dict[str, Any]:
    """Run a command; return its seconds, and the device's memory before, at most during and after it."""
    before, began, most = used_mib(), time.monotonic(), [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.3):
            most[0] = max(most[0], used_mib() or 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    finally:
        ended.set()
        watcher.join()
    seconds = time.monotonic() - began
    if done.returncode != 0:
        raise RuntimeError(f"status {done.returncode}: {done.stdout[-500:]}{done.stderr[-1000:]}")
    return {"seconds": round(seconds, 1), "mib_before": before, "mib_at_most": most[0], "mib_after": used_mib()}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
