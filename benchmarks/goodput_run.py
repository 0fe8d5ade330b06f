"""Run a real job under torchrun with faults, and one without, and compare what their time went to."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megavlm.programs.goodput import summary
from megavlm.programs.history import history_of, records_of
from megavlm.resilience.events import events
from megavlm.resilience.young_daly import FailingJob
from tests.support.data_files import sources_of, write_all
from tests.support.torchrun import Launched, last_iteration

LAUNCHER = "--standalone --nproc-per-node 2 --max-restarts 1000 --shutdown-timeout 5".split()
PROGRAM = "benchmarks/goodput_worker.py"
# Steps of some tenths of a second on two cores.
MODEL = (
    "--train-iters 1000000 --lr-decay-iters 1000 --global-batch-size 16 --micro-batch-size 4 --seq-length 256 "
    "--packing-window 64 --num-workers 1 --no-tensorboard --lr 1e-3 --lr-warmup-iters 3 --keep-checkpoints 3 --set "
    "model.vision.num_layers=2 model.vision.hidden_size=64 model.vision.ffn_hidden_size=128 "
    "model.vision.num_attention_heads=4 model.vision.image_size=16 model.vision.patch_size=4 "
    "model.projector.pixel_shuffle=2 model.language.num_layers=4 model.language.hidden_size=128 "
    "model.language.ffn_hidden_size=384 model.language.num_attention_heads=4 model.language.num_query_groups=4 "
    "--data-worker-timeout 10"
).split()
PATIENCE = 120.0  # seconds for a job to stop
FIRST_INTERVAL = 20  # iterations between saves until it is known what a save costs


def kill_rank(run: Launched, draw: random.Random) -> None:
    run.send(signal.SIGKILL, draw.choice(run.ranks()))


def stop_rank(run: Launched, draw: random.Random) -> None:
    """Suspend a rank for good: its process lives, and does nothing."""
    run.send(signal.SIGSTOP, draw.choice(run.ranks()))


def kill_worker(run: Launched, draw: random.Random) -> None:
    run.send(signal.SIGKILL, draw.choice(run.workers()))


def spoil_batch(run: Launched, draw: random.Random) -> None:
    (run.run_dir / "spoil").touch()


def ask_to_stop(run: Launched, draw: random.Random) -> None:
    """Let the job end as before maintenance; the caller starts it again."""
    run.send(signal.SIGTERM, run.process)


def damage(run: Launched, draw: random.Random) -> None:
    """Flip a bit of the newest checkpoint, and kill a rank, so that the checkpoint is needed."""
    newest = max((run.run_dir / "checkpoints").glob("iter_*"))
    file = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with file.open("r+b") as opened:
        place = draw.randrange(file.stat().st_size)
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 16]))
    kill_rank(run, draw)


def kill_torchrun(run: Launched, draw: random.Random) -> None:
    run.send(signal.SIGKILL, run.process)


FAULTS: Mapping[str, Callable[[Launched, random.Random], None]] = {
    "kill -9 of a rank": kill_rank,
    "SIGSTOP of a rank": stop_rank,
    "kill -9 of a data worker": kill_worker,
    "NaN in a batch": spoil_batch,
    "SIGTERM, started again": ask_to_stop,
    "newest checkpoint damaged, kill -9 of a rank": damage,
    "kill -9 of torchrun, started again": kill_torchrun,
}
STAY = (kill_worker, spoil_batch)  # these cost no restart


def drawn(minutes: float, every: float, draw: random.Random) -> list[tuple[float, str]]:
    """Return the seconds and kinds of faults: one at a random moment of each `every` seconds, all kinds in turn."""
    kinds: list[str] = []
    found = []
    for number in range(int(minutes * 60 / every)):
        kinds = kinds or draw.sample(sorted(FAULTS), len(FAULTS))
        found.append((every * (number + draw.random()), kinds.pop()))
    return found


@dataclass
class Job:
    """A job that is started again whenever it ends, for some minutes."""

    run_dir: Path
    argv: Sequence[str]
    faults: list[tuple[float, str]] = field(default_factory=list)  # seconds and kinds
    done: list[tuple[float, str]] = field(default_factory=list)  # seconds and kinds of faults that happened
    launches: int = 0

    def run(self, minutes: float, draw: random.Random) -> None:
        """Train for this long, while faults happen, and stop then."""
        began, waiting = time.monotonic(), list(self.faults)
        starts = 1  # that must have been for the next fault
        while (passed := time.monotonic() - began) < 60 * minutes:
            self.launches += 1
            with Launched(self.argv, self.run_dir, launcher=LAUNCHER, program=PROGRAM) as run:
                while run.process.poll() is None and (passed := time.monotonic() - began) < 60 * minutes:
                    if waiting and passed >= waiting[0][0] and self._trains(run, starts):
                        kind = waiting.pop(0)[1]
                        print(f"{passed:6.0f} s: {kind}, after iteration {last_iteration(self.run_dir)}", flush=True)
                        starts = self._starts() + (FAULTS[kind] not in STAY)
                        FAULTS[kind](run, draw)
                        self.done.append((passed, kind))
                    time.sleep(0.1)
                if run.process.poll() is None:
                    run.send(signal.SIGTERM, run.process)
                    run.process.wait(PATIENCE)
                end = time.monotonic() + PATIENCE
                while run.alive() and time.monotonic() < end:  # ranks that have lost their torchrun save and end
                    time.sleep(0.1)

    def _trains(self, run: Launched, starts: int) -> bool:
        """Return whether the job has started this often, and has done some steps since."""
        if self._starts() < starts or len(run.ranks()) != 2 or not run.workers():
            return False
        resumed = [event["iteration"] for event in events(self.run_dir) if event["kind"] == "start"][-1]
        return last_iteration(self.run_dir) > resumed + 2

    def _starts(self) -> int:
        return sum(event["kind"] == "start" for event in events(self.run_dir))

    def account(self) -> dict[str, Any]:
        past = history_of(events(self.run_dir), records_of(self.run_dir))
        assert past is not None
        return summary(self.run_dir.name, past)


def compared(minutes: float, *, every: float, seed: int, hang_timeout: float, folder: Path) -> dict[str, Any]:
    """Return what the time of a job with faults went to, and of one without, before and after it."""
    draw = random.Random(seed)
    os.environ["OMP_NUM_THREADS"] = "1"
    argv = [*MODEL, *sources_of(write_all(folder / "data", samples=400)), "--hang-timeout", str(hang_timeout)]
    calm = max(1.0, 0.15 * minutes)
    before = Job(folder / "calm-before", [*argv, "--save-interval", str(FIRST_INTERVAL)])
    before.run(calm, draw)
    costs = save_costs(records_of(before.run_dir))
    restarting = every * len(FAULTS) / (len(FAULTS) - len(STAY))
    interval = save_interval(costs, between_failures=restarting)
    argv += ["--save-interval", str(interval)]
    job = Job(folder / "faults", argv, drawn(minutes, every, draw))
    job.run(minutes, draw)
    after = Job(folder / "calm-after", argv)
    after.run(calm, draw)
    return {
        "minutes": minutes,
        "seconds_between_faults": every,
        "saves": {**asdict(costs), "interval": interval, "seconds_between_restarts": restarting},
        "faults": job.done,
        "launches": job.launches,
        **figures(job.account(), [before.account(), after.account()], seconds=60 * minutes),
    }


@dataclass(frozen=True)
class SaveCosts:
    """Median seconds of steps, of the stall of a save, and of a save until it counted."""

    step: float
    stall: float
    save: float


def save_costs(records: Sequence[Mapping[str, Any]]) -> SaveCosts:
    def median(name: str) -> float:
        return statistics.median(record[name] for record in records[2:] if name in record)

    return SaveCosts(step=median("step_time_s"), stall=median("save_stall_s"), save=median("save_time_s"))


def save_interval(costs: SaveCosts, *, between_failures: float) -> int:
    """Return the iterations between saves that Young and Daly recommend, and no fewer than a save takes."""
    job = FailingJob(gpus=1, rate=3600 / between_failures, stall=costs.stall, restart=0.0, detection=0.0)
    return max(1, round(max(job.best_interval, costs.save) / costs.step))


def figures(faults: Mapping[str, Any], calm: Sequence[Mapping[str, Any]], *, seconds: float) -> dict[str, Any]:
    """Return the share of time in steps that count with faults, without, and their ratio, from summaries of runs.

    A job without faults starts once. Its share after the start is measured over the minutes before and after, and one
    start is taken off, as if it had run as long as the job with faults.
    """
    started = [run["seconds"].get("start", 0.0) for run in calm]
    after_start = sum(run["wall_s"] for run in calm) - sum(started)
    running = sum(run["kept"] * run["wall_s"] for run in calm) / after_start
    undisturbed = running * (1 - statistics.mean(started) / seconds)
    return {
        "goodput": faults["kept"],
        "undisturbed": undisturbed,
        "ratio": faults["kept"] / undisturbed,
        "iterations": faults["iterations"],
        "iterations_per_second": faults["iterations"] / faults["wall_s"],
        "undisturbed_iterations_per_second": sum(run["iterations"] for run in calm) / after_start,
        "lost_iterations": sum(each["lost_steps"] for each in faults["recoveries"]),
        "with_faults": faults,
        "without": list(calm),
    }
