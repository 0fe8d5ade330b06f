"""Threads of two ranks in one process, over torch's store: one hangs, and both end with stacks and one line."""

from __future__ import annotations

import threading
import time
from hashlib import pbkdf2_hmac
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megavlm.resilience.events import events
from megavlm.resilience.hang_reports import Limits
from megavlm.resilience.phases import COMPUTE, SAVE, Phases
from megavlm.resilience.status import HUNG
from megavlm.resilience.watchdog import RunMember, Watchdog, seconds_between_reports


class Ranks:
    """Watchdogs of a world in one process, each over its own part of the run."""

    def __init__(self, world: int, run_dir: Path, *, timeout: float | None) -> None:
        self.store = dist.PrefixStore("run", dist.HashStore())
        self.ended: list[tuple[int, int]] = []
        self.phases = [Phases() for _ in range(world)]
        self.dogs = [self._dog(rank, world, run_dir, timeout) for rank in range(world)]
        for phases in self.phases:
            phases.begin_step(1)
            phases.end_step()
            phases.begin_step(2)

    def _dog(self, rank: int, world: int, run_dir: Path, timeout: float | None) -> Watchdog:
        def end(status: int) -> None:
            self.ended.append((rank, status))
            self.dogs[rank]._closed.set()  # ends this thread, as os._exit the process

        member = RunMember(rank=rank, world=world, run_dir=run_dir)
        dog = Watchdog(
            self.phases[rank],
            member,
            self.store.clone(),
            limits=Limits(timeout),
            memory=lambda: 100 * (rank + 1),
            end=end,
        )
        dog.owns_folder = True
        return dog

    def start(self) -> None:
        for dog in self.dogs:
            dog.start()

    def close(self) -> None:
        for dog in self.dogs:
            dog.close()


def wait(condition, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.02)
    return condition()


def test_a_rank_without_progress_ends_all_with_stacks_and_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    ranks = Ranks(2, tmp_path, timeout=1.0)
    ranks.start()
    ranks.phases[1].enter(COMPUTE, "forward of chunk 0, micro-batch 5")
    keep_going = True

    def work() -> None:
        while keep_going:
            ranks.phases[0].enter(COMPUTE)
            time.sleep(0.02)

    worker = threading.Thread(target=work)
    worker.start()
    assert wait(lambda: len(ranks.ended) == 2)
    keep_going = False
    worker.join()
    assert [report.peak_memory for report in ranks.dogs[0].table.values()] == [100, 200]
    assert sorted(ranks.ended) == [(0, HUNG), (1, HUNG)]
    (folder,) = tmp_path.glob("hang-*")
    # Where an earlier test of this process had a group, torch's flight recorder holds its collectives.
    assert {path.name for path in folder.glob("*.txt")} == {"README.txt", "rank-0.txt", "rank-1.txt"}
    stacks = (folder / "rank-1.txt").read_text()
    assert "test_watchdog.py" in stacks
    assert "watchdog" in stacks
    line = capfd.readouterr().err
    assert line.count("the run hangs: rank 1 (") == 1
    assert "in iteration 2, compute (forward of chunk 0, micro-batch 5)" in line
    (event,) = events(tmp_path)
    assert (event["kind"], event["stopped_rank"], event["phase"]) == ("hang", 1, COMPUTE)


@pytest.mark.parametrize(("silent", "at_once"), [(0, False), (2, False), (2, True)])
def test_a_rank_whose_process_is_stopped_is_found_by_the_first_or_the_last(silent, at_once, tmp_path, capfd):
    """With `at_once`, it stops before its thread has published anything. The folder is still another run's."""
    ranks = Ranks(3, tmp_path, timeout=1.0)
    for each in ranks.dogs:
        each.owns_folder = False
    dog = ranks.dogs[silent]
    round_, stopped = dog._round, threading.Event()
    if at_once:
        stopped.set()
    dog._round = lambda passed: None if stopped.is_set() else round_(passed)
    dog._finish = lambda verdict: None
    ranks.start()
    assert wait(lambda: all(ranks.dogs[rank].table for rank in {0, 2} - {silent}))
    stopped.set()
    assert wait(lambda: len(ranks.ended) == 2)
    assert f"rank {silent} (" in capfd.readouterr().err
    dog._closed.set()
    assert [path.name[:5] for path in tmp_path.iterdir()] == ["hang-"]


class Counting:
    """A store that counts how often it is asked, over all connections."""

    def __init__(self, store: dist.Store, asked: list[str]) -> None:
        self._store, self._asked = store, asked

    def clone(self) -> Counting:
        return Counting(self._store.clone(), self._asked)

    def __getattr__(self, name: str):
        self._asked.append(name)
        return getattr(self._store, name)


@pytest.mark.parametrize("world", [8, 1024, 16384])
@pytest.mark.parametrize("hang", [None, 20.0])
def test_a_store_is_asked_a_thousand_times_a_second_at_most(world: int, hang: float | None, tmp_path: Path):
    """Ranks that do not read ask once in a round."""
    asked: list[str] = []
    store = Counting(dist.PrefixStore("run", dist.HashStore()), asked)
    for rank in range(world - 1 if world == 8 else 0):  # what others have reported
        Watchdog(Phases(), RunMember(rank, world, tmp_path), store, limits=Limits(hang))._round(1.0)
    in_a_round = []
    for rank in (1, world - 1):
        before = len(asked)
        Watchdog(Phases(), RunMember(rank, world, tmp_path), store, limits=Limits(hang))._round(1.0)
        in_a_round.append(len(asked) - before)
    other, reader = in_a_round
    assert (world - 2) * other + 2 * reader <= 1000 * seconds_between_reports(world, hang)


@pytest.mark.parametrize(("spins", "counted"), [(True, True), (False, False)])
def test_a_wait_that_spins_counts_where_the_device_is_a_gpu(spins: bool, counted: bool, tmp_path: Path):
    """CUDA's wait for a stream uses processor time."""
    stream, going = SimpleNamespace(synchronize=pbkdf2_hmac), [True]  # C code that computes without Python's lock

    def work() -> None:
        while going:
            stream.synchronize("sha256", b"", b"", 100_000)

    store = dist.HashStore()
    dog = Watchdog(Phases(), RunMember(0, 1, tmp_path, wait_spins=spins), store, limits=Limits(1.0))
    thread = threading.Thread(target=work)
    thread.start()
    dog._trained = thread.ident or 0
    for _ in range(8):
        dog._report(1.0)
        time.sleep(0.02)
    waited = dog._report(1.0).waited
    going.clear()
    thread.join()
    assert (waited > 0) is counted


def test_with_a_time_out_of_0_nothing_is_a_hang(tmp_path: Path):
    ranks = Ranks(1, tmp_path, timeout=0.0)
    (dog,) = ranks.dogs
    dog._idle, dog._changes = 1e6, dog._phases.now.changes
    dog._round(1.0)
    dog._round(1.0)
    assert dog.table[0].idle > 1e6
    assert not ranks.ended


def test_a_process_that_was_suspended_has_not_been_idle_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ranks = Ranks(1, tmp_path, timeout=30.0)
    (dog,) = ranks.dogs
    rounds: list[float] = []
    dog._round = rounds.append
    times = iter([0.0, 3.0, 603.0])  # ten minutes between two rounds
    monkeypatch.setattr("megavlm.resilience.watchdog.time", SimpleNamespace(monotonic=lambda: next(times)))
    waits = iter([False, False, True])
    monkeypatch.setattr(dog._closed, "wait", lambda seconds: next(waits))
    dog._watch()
    assert rounds == [3.0, 6.0]


def test_progress_a_save_and_a_closed_watch_are_no_hang(tmp_path: Path):
    ranks = Ranks(2, tmp_path, timeout=0.5)
    ranks.start()
    for phases in ranks.phases:
        phases.enter(SAVE)
    wait(lambda: bool(ranks.ended), 1.5)
    ranks.dogs[1].close()
    wait(lambda: bool(ranks.ended), 1.5)
    ranks.close()
    assert not ranks.ended
    assert not list(tmp_path.iterdir())
