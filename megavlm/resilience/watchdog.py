"""End a run that hangs, with a line that names the rank that stopped first, and with the stacks of all ranks.

A thread of each rank publishes a report to the store every few seconds, in larger worlds less often. The first and the
last rank (which are on two hosts if the run is) read all reports, so that either may be the one that stopped. They
write their verdict to the store. The thread of each rank without progress reads the verdict and ends the process,
because the training thread may wait in a collective for ever.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import linecache
import os
import platform
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from megavlm.files import open_new, replace_file
from megavlm.resilience import events
from megavlm.resilience.events import HUNG, write_status
from megavlm.resilience.hang_reports import Limits, Report, culprit, is_silent, sentence
from megavlm.resilience.phases import END, Phases

INTERVAL = 5.0  # seconds between reports, at least
MOST_REPORTS = 900  # of all ranks in a second: one store serves them, on a processor of rank 0's host
_ROUNDS = 6  # intervals without progress that are no hang: fewer tell no slow report from a missing one
_WRITE = 20.0  # seconds in which ranks write their stacks
_VERDICT = "verdict"  # its key in the store
_STEPS = 50  # steps whose median time gives the default of --hang-timeout


@dataclass(frozen=True)
class RunMember:
    """Rank, world size and folder of this process in the run."""

    rank: int
    world: int
    run_dir: Path
    wait_spins: bool = False  # whether a wait for the device uses processor time, as one for CUDA may

    @property
    def reads(self) -> bool:
        """Return whether this rank reads the reports of all ranks."""
        return self.rank in (0, self.world - 1)


def seconds_between_reports(world: int, hang: float | None) -> float:
    """Return the seconds between two reports of a rank; `hang` is --hang-timeout.

    A report is one operation of the store. All other operations come from the two ranks that read, or end a run.
    """
    return max(min(INTERVAL, hang / 10) if hang else INTERVAL, world / MOST_REPORTS)


class Watchdog:
    """Watches the progress of the thread that created it, until `close`."""

    def __init__(
        self,
        phases: Phases,
        member: RunMember,
        store: Any,
        *,
        limits: Limits,
        memory: Callable[[], int] = lambda: 0,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        """Prepare to watch. `store` is torch's, on its own connection; `memory` returns the peak memory in bytes."""
        self.owns_folder = False  # whether this run has locked its folder: status.json may be another run's before
        self.energy: float | None = None  # of a step, which reports tell; not asked for here: a lost GPU may not answer
        self.table: Mapping[int, Report] = {}  # the latest reports, on ranks that read; replaced whole
        self._phases = phases
        self._member = member
        self._store = store
        self._limits = limits
        self._memory = memory
        self._end = end
        self._interval = seconds_between_reports(member.world, limits.hang)
        self._trained = threading.get_ident()
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._beat = 0
        self._idle = self._waited = 0.0
        self._spent = 0
        self._place = ""
        self._changes = -1
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Publish a first report at once, then start the thread.

        Reports are judged when every rank has one: a rank that stopped before its first would never be named.
        """
        self._store.set(_key(self._member.rank), self._report(0.0).dumps())
        self._thread.start()

    def step_done(self, seconds: float) -> None:
        """Note the duration of a step."""
        self._steps.append(seconds)

    def close(self) -> None:
        """Stop watching, and publish that this rank has ended."""
        self._phases.enter(END)
        self._closed.set()
        self._thread.join(timeout=10)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            # A process that was suspended and goes on has not been idle for that long, nor have the others.
            passed, before = min(now - before, 2 * self._interval), now
            try:
                verdict = self._round(passed)
                if verdict is not None:
                    self._finish(verdict)
                    return
            except Exception as error:  # the store is gone with torchrun: others notice that
                if not self._closed.is_set():
                    print(f"watchdog of rank {self._member.rank} ends: {error}", file=sys.stderr, flush=True)
                return
        with contextlib.suppress(Exception):  # others may have ended, and the store with them
            self._store.set(_key(self._member.rank), self._report(0.0).dumps())

    def _round(self, passed: float) -> dict[str, Any] | None:
        """Publish a report; return the verdict if one exists and this rank makes no progress or is one that judges."""
        report = self._report(passed)
        self._store.set(_key(report.rank), report.dumps())
        if self._member.reads:
            self._read(passed)
            self._judge()
        elif report.idle <= self._interval:
            return None
        return json.loads(self._store.get(_VERDICT)) if self._store.check([_VERDICT]) else None

    def _timeout(self) -> float:
        """Return the seconds without progress that count as a hang."""
        return max(self._limits.timeout(list(self._steps)), _ROUNDS * self._interval)

    def _report(self, passed: float) -> Report:
        now, totals = self._phases.now, self._phases.totals
        self._idle = self._idle + passed if now.changes == self._changes else 0.0
        self._changes = now.changes
        self._beat += 1
        place, waits = place_of(self._trained) if self._idle > self._interval else ("", False)
        spent = processor_time(self._trained) if waits else 0
        # One wait takes no processor time at all, or spins at one place.
        spins = place == self._place and now.detail != _MANY_WAITS
        same = spins if self._member.wait_spins else spent == self._spent
        ends = waits and not place.startswith(_UNLIMITED)
        self._waited = self._waited + passed if ends and same else 0.0
        self._spent, self._place = spent, place
        return Report(
            rank=self._member.rank,
            host=platform.node(),
            process=os.getpid(),
            beat=self._beat,
            iteration=now.iteration,
            phase=now.phase,
            detail=now.detail,
            idle=self._idle,
            place=place,
            waits=waits,
            waited=self._waited,
            steps=totals.steps,
            seconds=totals.seconds,
            peak_memory=self._memory(),
            energy=self.energy,
        )

    def _read(self, passed: float) -> None:
        """Read the reports of all ranks, once all have one; update the seconds since each rank's last new report."""
        keys = [_key(rank) for rank in range(self._member.world)]
        if not self.table and not self._store.check(keys):
            return
        read = {rank: Report.loads(text) for rank, text in enumerate(self._store.multi_get(keys))}
        self.table = {rank: report.after(self.table.get(rank), passed) for rank, report in read.items()}

    def _judge(self) -> None:
        if self._limits.hang == 0:
            return
        table = list(self.table.values())
        found = culprit(table, timeout=self._timeout(), limits=self._limits, interval=self._interval)
        if found is None:
            return
        verdict = {
            "line": sentence(found, table, interval=self._interval),
            "rank": found.rank,
            "iteration": found.iteration,
            "seconds": round(found.idle + found.silent, 1),
            "phase": found.phase,
            "silent": [each.rank for each in table if is_silent(each, self._interval)],
            "folder": f"hang-{time.strftime('%Y%m%d-%H%M%S')}-attempt-{events.attempt()}",
            "by": self._member.rank,
        }
        self._store.compare_set(_VERDICT, "", json.dumps(verdict))  # the first of the two ranks that judge sets it

    def _finish(self, verdict: Mapping[str, Any]) -> None:
        """Write the stacks, let the rank that found the hang print its line, and end this process."""
        rank, folder = self._member.rank, self._member.run_dir / verdict["folder"]
        with contextlib.suppress(OSError):
            write_stacks(folder / f"rank-{rank}.txt", f"rank {rank}, {platform.node()}, {self._phases.now}\n")
        self._store.add("written", 1)
        if rank == verdict["by"]:
            expected = self._member.world - len(verdict["silent"])
            last = time.monotonic() + _WRITE
            while time.monotonic() < last and self._store.add("written", 0) < expected:
                time.sleep(0.1)
            self._say(verdict, folder)
            self._store.set("said", "")
        else:
            with contextlib.suppress(Exception):  # it did not say it in time, or is gone
                self._store.wait(["said"], timedelta(seconds=2 * _WRITE))
        sys.stdout.flush()
        sys.stderr.flush()
        self._end(HUNG)

    def _say(self, verdict: Mapping[str, Any], folder: Path) -> None:
        line = verdict["line"]
        mute = ", ".join(map(str, verdict["silent"]))
        with contextlib.suppress(OSError):
            said = f"{line}\n" + (f"no stacks of rank {mute}: no answer\n" if mute else "")
            replace_file(folder / "README.txt", said)
        print(f"the run hangs: {line}; stacks of all ranks: {folder}", file=sys.stderr, flush=True)
        if not self.owns_folder:
            return
        events.record(
            self._member.run_dir,
            "hang",
            iteration=max(0, verdict["iteration"] - 1),
            seconds=verdict["seconds"],
            reason=line,
            stopped_rank=verdict["rank"],
            phase=verdict["phase"],
            stacks=folder.name,
        )
        write_status(self._member.run_dir, "failed", reason=f"the run hangs: {line}", exit_status=HUNG)


def _key(rank: int) -> str:
    return f"rank-{rank}"


# Files whose functions wait for other ranks, and what a line that waits for a transfer looks like elsewhere.
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")
_WAITS = (".wait(", ".synchronize(", ".tolist(", ".item(")
_MANY_WAITS = "weights"  # the part of a start in which ranks wait at one place thousands of times, and briefly
_UNLIMITED = "rank_0_came "  # waits in the store while rank 0 works alone: torch ends no such wait


def place_of(thread: int) -> tuple[str, bool]:
    """Return the place of a thread, as "all_reduce (…/distributed_c10d.py:2890) called by …", and whether it waits for
    other ranks; ("", False) for a thread that has ended.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "", False
    frames = traceback.extract_stack(frame)
    inner = frames[-1]
    collective = next((each.name for each in reversed(frames) if each.filename.endswith(_COLLECTIVES)), None)
    waits = collective is not None or any(
        word in linecache.getline(inner.filename, inner.lineno or 0) for word in _WAITS
    )
    ours = next((each for each in reversed(frames) if "/megavlm/" in each.filename), None)
    text = f"{inner.name} ({_short(inner)})"
    if ours is not None and ours is not inner:
        text += f" called by {ours.name} ({_short(ours)})"
    return text, waits


def processor_time(thread: int) -> int:
    """Return the nanoseconds of processor time that a living thread has used: a waiting thread adds none."""
    return time.clock_gettime_ns(time.pthread_getcpuclockid(thread))


def write_stacks(path: Path, header: str) -> None:
    """Write the stacks of all threads of this process.

    The file names the training thread's identifier, since `faulthandler` prints identifiers alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with io.TextIOWrapper(open_new(path), encoding="utf-8") as file:
        print(header, file=file)
        for thread in threading.enumerate():
            print(f"thread 0x{thread.ident or 0:016x}: {thread.name}", file=file)
        print(file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)


def _short(frame: traceback.FrameSummary) -> str:
    parts = Path(frame.filename).parts
    return f"{'/'.join(parts[-3:])}:{frame.lineno}"
