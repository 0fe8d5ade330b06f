"""What copies to an object store cost training: `python benchmarks/uploads.py [--store URL] [--quick]`.

A run with --checkpoint-dir saves by turns while nothing is copied, and while the checkpoint before is on its way. For
both: how long training stands still for the save, and how long a step takes. Without --store, moto's S3 server runs
beside it (`make store-tools`), and takes processor time that a cloud would not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint import Spent, built, median, spent
from record import append, circumstances

ROOT = Path(__file__).resolve().parents[1]
REPEAT, STEPS = 3, 3
_PATIENCE = 300.0  # seconds


def main(argv: Sequence[str]) -> None:
    """Measure, print and record the figures."""
    parser = argparse.ArgumentParser(description="Measure saves while checkpoints are copied to an object store.")
    parser.add_argument("--store", metavar="URL", help="Where to copy to; default: an S3 server that is started.")
    parser.add_argument("--processes", type=int, default=1, help="Number of processes.")
    parser.add_argument("--layers", type=int, default=2, help="Language layers: 7 million parameters each.")
    parser.add_argument("--quick", action="store_true", help="A small model, two saves; nothing is recorded.")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    layers = 1 if options.quick else options.layers
    if options.worker is not None:
        return work(options.worker, options.store, layers=layers, quick=options.quick)
    record = {**circumstances(), "processes": options.processes}
    if options.store is not None:
        record |= {"store": options.store.partition("://")[0]}
        record |= measure(options.store, {}, processes=options.processes, layers=layers, quick=options.quick)
    else:
        sys.path.insert(0, str(ROOT))
        from tests.support.object_stores import S3

        server = S3()
        server.make_bucket("bucket")
        environment = server.env(f"http://{server.address}")
        record |= {"store": "moto's S3 on this machine"}
        record |= measure(
            "s3://bucket/run", environment, processes=options.processes, layers=layers, quick=options.quick
        )
        server.close()
    print(json.dumps(record, indent=2), flush=True)
    if not options.quick:
        append("uploads", record)


def measure(store: str, variables: dict[str, str], *, processes: int, layers: int, quick: bool) -> dict[str, Any]:
    """Return the figures of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += [str(Path(__file__)), "--worker", folder, "--layers", str(layers), "--store", store]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
        subprocess.run([*command, *(["--quick"] if quick else [])], check=True, env=environment)
        found: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text())
        return found


def work(folder: Path, store: str, *, layers: int, quick: bool) -> None:
    """Train and save by turns; rank 0 writes the medians. Raises ValueError if a copy ended before a save had begun."""
    run = built(folder, layers=layers, flags=["--checkpoint-dir", store])
    import torch.distributed as dist

    from megavlm.train.loop import close

    turns: dict[bool, list[Turn]] = {False: [], True: []}
    for number in range(1, 2 * (1 if quick else REPEAT) + 3):
        copies = number % 2 == 0
        turns[copies].append(turn := _turn(run, number, copies=copies))
        if copies and not turn.copying and not quick:
            raise ValueError("a copy was over before the save beside it had begun: take more --layers")
    uploads = _uploads(folder)
    close(run)
    if dist.get_rank() == 0:
        figures = _figures(turns, uploads[1:])
        (folder / "figures.json").write_text(json.dumps({"layers": layers, **figures}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


@dataclass(frozen=True)
class Turn:
    """What a save and a step took, and whether something was still being copied when the save had begun."""

    stall: Spent
    step: Spent
    copying: bool


def _turn(run: Any, number: int, *, copies: bool) -> Turn:
    """Measure steps and a save, while the checkpoint before is copied or while nothing is."""
    import torch.distributed as dist

    from megavlm.checkpoint import state

    if dist.get_rank() == 0 and number > 1:
        if copies:
            before = _read_by(run.uploads)
            _wait_for(lambda: _read_by(run.uploads) > before + 2**22)
        else:
            _wait_for(lambda: _copied(run.run_dir) == number - 1)
    dist.barrier()
    steps = [spent(lambda: run.engine.train_step(run.data_loader.next_step().batches))[1] for _ in range(STEPS)]
    position = state.Position(iteration=number, loader={})
    save = partial(state.save, run.engine.trained(), position, config=run.config, plan=run.plan, saver=run.saver)
    _, stall = spent(save)
    copying = _copied(run.run_dir) < number - 1
    run.saver.wait()
    (report,) = run.saver.poll()
    assert report.error is None, report.error
    return Turn(stall, median(steps), copying)


def _figures(turns: dict[bool, list[Turn]], uploads: Sequence[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for copies, name in ((False, "alone"), (True, "copying")):
        stall = median([turn.stall for turn in turns[copies][1:]])  # one is warm-up
        step = median([turn.step for turn in turns[copies][1:]])
        found |= {f"{name}_stall_s": stall.seconds, f"{name}_step_s": step.seconds}
        found[f"{name}_stall_cpu_s"] = stall.processor
    moved, seconds = (sum(each[key] for each in uploads) for key in ("bytes", "seconds"))
    return found | {
        "stall_of_alone": found["copying_stall_s"] / found["alone_stall_s"],
        "stall_of_alone_cpu": found["copying_stall_cpu_s"] / found["alone_stall_cpu_s"],
        "step_of_alone": found["copying_step_s"] / found["alone_step_s"],
        "gigabytes": moved / len(uploads) / 1e9,
        "copy_gb_per_s": moved / 1e9 / seconds,
    }


def _uploads(run_dir: Path) -> list[dict[str, Any]]:
    from megavlm.resilience.events import events

    return [event for event in events(run_dir) if event["kind"] == "upload"]


def _copied(run_dir: Path) -> int:
    """Return the iteration of the newest checkpoint in the store."""
    return max((each["iteration"] for each in _uploads(run_dir)), default=0)


def _read_by(uploads: Any) -> int:
    """Return the bytes that the copying process has read (proc(5))."""
    return int(Path(f"/proc/{uploads._process.pid}/io").read_text().split()[1])


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < end, "the store does not answer"
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1:])
