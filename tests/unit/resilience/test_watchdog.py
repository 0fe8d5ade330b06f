"""Who is late and who hangs: phases of a step, reports of ranks, and the watchdog over torch's store."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta
from hashlib import pbkdf2_hmac
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megavlm.parallel.rendezvous import Meeting, TorchWorld
from megavlm.resilience.events import HUNG, events
from megavlm.resilience.hang_reports import (
    DOOMED,
    FIRST_STEP,
    Limits,
    Report,
    SlowEvents,
    culprit,
    memory_by_stage,
    sentence,
    spread,
)
from megavlm.resilience.phases import COMMUNICATION, COMPUTE, DATA, END, OTHER, SAVE, START, VALIDATION, Phases
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


@pytest.mark.parametrize(
    ("spins", "part", "counted"), [(True, "model", True), (True, "weights", False), (False, "model", False)]
)
def test_a_wait_that_spins_counts_where_the_device_is_a_gpu(spins: bool, part: str, counted: bool, tmp_path: Path):
    """CUDA's wait for a stream uses processor time. A load is many waits at one place, each with a limit of its own."""
    stream, going = SimpleNamespace(synchronize=pbkdf2_hmac), [True]  # C code that computes without Python's lock

    def work() -> None:
        while going:
            stream.synchronize("sha256", b"", b"", 100_000)

    store = dist.HashStore()
    phases = Phases()
    phases.enter(START, part)
    dog = Watchdog(phases, RunMember(0, 1, tmp_path, wait_spins=spins), store, limits=Limits(1.0))
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


@pytest.mark.parametrize("spins", [True, False])
def test_a_wait_for_rank_0_in_the_store_is_none_that_torch_will_end(spins: bool, tmp_path: Path):
    """Rank 0 may index data for hours, as long as the other ranks of a GPU run are at the same place."""
    store = dist.HashStore()
    thread = threading.Thread(target=TorchWorld("gloo", Meeting(store, 1, 2), timedelta(minutes=1)).await_rank_0)
    thread.start()
    dog = Watchdog(Phases(), RunMember(1, 2, tmp_path, wait_spins=spins), store, limits=Limits(1.0))
    dog._trained = thread.ident or 0
    assert wait(lambda: dog._report(1.0).waits)
    found = [dog._report(1.0) for _ in range(3)]
    store.set("turn-1", "")
    thread.join()
    assert [(report.waits, report.waited) for report in found] == [(True, 0.0)] * 3


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


class Counter:
    """Each moment is a second after the last."""

    def __init__(self) -> None:
        self.now = 0

    def moment(self) -> int:
        self.now += 1
        return self.now

    def has_passed(self, moment: int) -> bool:
        return True

    def seconds(self, earlier: int, later: int) -> float:
        return float(later - earlier)


def test_a_step_s_seconds_are_those_between_changes_of_phase():
    phases = Phases(Counter())
    for iteration in (1, 2):
        phases.begin_step(iteration)
        phases.enter(COMPUTE, "forward")
        phases.enter(COMPUTE, "backward")  # the same phase: no moment, but progress
        phases.enter(COMMUNICATION)
        phases.enter(COMPUTE)
        phases.enter(OTHER)
        phases.end_step()
    assert phases.totals.steps == 2
    assert [phases.totals.seconds[each] for each in (DATA, COMPUTE, COMMUNICATION)] == [2.0, 4.0, 2.0]


def test_every_entry_is_progress_and_says_where():
    phases = Phases()
    phases.begin_step(7)
    before = phases.now
    phases.enter(COMPUTE, "forward of chunk 0, micro-batch 1")
    assert phases.now.changes > before.changes
    assert phases.now[:3] == (7, COMPUTE, "forward of chunk 0, micro-batch 1")


def test_what_lies_between_steps_is_counted_by_the_host_s_clock():
    phases = Phases(Counter())
    phases.begin_step(1)
    phases.end_step()
    phases.enter(SAVE)
    phases.begin_step(2)
    assert 0 < phases.totals.seconds[SAVE] < 1.0


def report(rank: int, **changed) -> Report:
    fixed = Report(
        rank=rank,
        host="node1",
        process=100 + rank,
        beat=9,
        iteration=13,
        phase=COMPUTE,
        detail="forward of chunk 0, micro-batch 3",
        idle=70.0,
        place="",
        waits=False,
        steps=12,
    )
    return replace(fixed, **changed)


LIMITS = Limits(data=900.0, collective=600.0)


def named(*table: Report, timeout: float = 60.0) -> int | None:
    found = culprit(table, timeout=timeout, limits=LIMITS, interval=5.0)
    return None if found is None else found.rank


def test_the_rank_whose_process_is_stopped_is_named_and_not_one_that_waits_for_it():
    """Rank 0 waits in a collective; rank 1 has stopped, and its last report says that it computes."""
    assert named(report(0, idle=65.0, waits=True), report(1, idle=2.0, silent=66.0)) == 1
    assert named(report(0, idle=2.0, silent=66.0), report(1, idle=65.0, waits=True)) == 0
    stopped_in_a_wait = report(1, idle=2.0, silent=66.0, waits=True)
    assert named(report(0, idle=65.0, waits=False), stopped_in_a_wait) == 1  # 0 polls what 1 would answer


def test_of_ranks_that_answer_the_one_that_does_not_wait_is_named():
    assert named(report(0, waits=True, idle=80.0), report(1, waits=False), report(2, waits=True, idle=90.0)) == 1


def test_where_all_wait_the_rank_that_is_behind_is_named_and_then_the_one_that_began_first():
    waiting = [report(rank, waits=True) for rank in range(4)]
    assert named(*waiting[:2], replace(waiting[2], iteration=12), waiting[3]) == 2
    assert named(*waiting[:3], replace(waiting[3], idle=75.0)) == 3


@pytest.mark.parametrize(
    ("changed", "hangs"),
    [
        ({"idle": 59.0}, False),
        ({"idle": 61.0}, True),
        ({"idle": 61.0, "phase": SAVE}, False),
        ({"idle": 61.0, "phase": VALIDATION}, False),
        ({"idle": 61.0, "steps": 0}, False),
        ({"idle": FIRST_STEP + 1, "steps": 0}, True),
        ({"idle": 301.0, "phase": SAVE}, True),
        ({"silent": 59.0, "phase": SAVE}, False),
        ({"silent": 61.0, "phase": SAVE}, True),  # a process that does not answer is not busy
        ({"silent": 61.0, "phase": START, "steps": 0}, False),
        ({"silent": 500.0, "phase": END}, False),  # a rank that is done sends no reports
        ({"idle": 890.0, "phase": DATA}, False),  # a data worker that hangs is replaced meanwhile
        ({"idle": 910.0, "phase": DATA}, True),
        ({"idle": 61.0, "phase": DATA, "waits": True}, True),  # for another rank, not for data
        ({"idle": 86390.0, "phase": START, "steps": 0}, False),
        ({"idle": 86410.0, "phase": START, "steps": 0}, True),
    ],
)
def test_a_save_an_evaluation_and_a_first_step_may_take_longer(changed, hangs: bool):
    assert (named(report(0, **changed)) is not None) is hangs


def test_a_rank_that_waits_for_another_rank_s_save_does_not_hang():
    assert named(report(0, phase=SAVE, idle=200.0), report(1, phase=DATA, idle=200.0, waits=True)) is None


def test_who_keeps_others_waiting_is_named_before_torch_ends_these_without_a_name():
    """In phases in which a rank may take longer than a collective of another may wait for it."""
    busy = report(0, phase=START, steps=0, idle=DOOMED * 600 + 9)
    waiting = replace(busy, rank=1, waits=True)
    assert named(busy, replace(waiting, waited=DOOMED * 600 - 1)) is None
    assert named(busy, replace(waiting, waited=DOOMED * 600 + 1)) == 0


@pytest.mark.parametrize("iteration", [0, 11])
def test_what_a_stopped_rank_said_long_ago_does_not_count(iteration: int):
    """A report may be older than a step, because ranks report every few seconds only."""
    early = {"iteration": iteration, "steps": 0, "phase": START, "idle": 0.0, "silent": 66.0}
    assert named(report(0, idle=65.0, waits=True), report(1, **early)) == 1


def test_the_default_is_ten_median_steps_and_never_below_a_minute():
    assert Limits().timeout([1.0, 2.0, 300.0]) == 60.0
    assert Limits().timeout([20.0, 30.0, 3000.0]) == 300.0
    assert Limits().timeout([]) == 60.0
    assert Limits(7.0).timeout([20.0]) == 7.0


def test_the_line_names_rank_host_place_and_that_it_does_not_answer():
    table = [report(0, idle=65.0, waits=True), report(1, idle=2.0, silent=66.0)]
    line = sentence(table[1], table, interval=5.0)
    assert line.startswith("rank 1 (node1, process 101) has made no progress for 68 s in iteration 13, compute (forwar")
    assert "micro-batch 3" in line
    assert "does not answer" in line
    assert line.endswith("of the others, 1 of 1 wait in a collective")


def test_a_report_survives_the_store():
    sent = report(3, seconds={COMPUTE: 1.5})
    assert Report.loads(sent.dumps()) == sent


def steps_of(rank: int, steps: int, process: int = 1, **seconds: float) -> Report:
    return Report(rank, f"node{rank}", process, 1, steps, COMPUTE, "", 0.0, "", False, steps=steps, seconds=seconds)


def test_a_rank_that_reads_slowly_is_named_with_the_phase_and_not_one_that_waits_for_it():
    """Row 23: rank 1 sleeps 1.5 s a step, rank 0 waits for its gradients."""
    before = {rank: steps_of(rank, 2, compute=1.0, data=0.5, communication=0.0) for rank in (0, 1)}
    after = {
        0: steps_of(0, 12, compute=6.0, data=0.6, communication=15.5),
        1: steps_of(1, 12, compute=6.0, data=15.6, communication=0.5),
    }
    found = spread(before, after)
    assert (found["slowest_rank"], found["slowest_rank_phase"], round(found["slowest_rank_s"], 3)) == (1, DATA, 2.01)
    assert found["slow"] == "rank 1 (node1) takes 1.50 s per step more than the median, in data"
    assert round(found["phase_seconds"][COMMUNICATION], 3) == 0.8


def test_memory_is_that_of_the_fullest_rank_of_each_stage():
    table = {rank: report(rank, peak_memory=2**30 * peak) for rank, peak in enumerate((3, 5, 2, 1))}
    assert memory_by_stage(table, 2) == {"0": 5.0, "1": 2.0}


def test_equal_ranks_are_not_worth_a_word():
    before = {rank: steps_of(rank, 1, compute=0.0) for rank in range(4)}
    after = {rank: steps_of(rank, 2, compute=1.0 + 0.02 * rank, save=9.0 * rank) for rank in range(4)}
    found = spread(before, after)
    assert "slow" not in found
    assert found["slowest_rank"] == 3
    assert SAVE in found["phase_seconds"]


def test_nothing_is_said_before_each_rank_has_done_a_step_nor_over_a_restart():
    early, late = {0: steps_of(0, 0), 1: steps_of(1, 3)}, {0: steps_of(0, 4), 1: steps_of(1, 4)}
    assert spread(early, late) is None
    assert spread(late, late) is None
    assert spread({0: steps_of(0, 1), 1: steps_of(1, 1, process=7)}, late) is None
    assert spread({}, late) is None


def slow(rank: int, phase: str = COMPUTE) -> dict[str, object]:
    return {"slowest_rank": rank, "slowest_rank_phase": phase, "slow": "it is slow"}


def test_a_rank_that_stays_slow_is_an_event_now_and_then():
    wanted = SlowEvents()
    said = [second for second in range(0, 2_000, 5) if wanted.wants(slow(1), float(second))]
    assert said == [10, 610, 1210, 1810]


def test_reports_that_name_one_rank_after_another_are_no_event():
    """Noise: somebody is always the slowest."""
    wanted = SlowEvents()
    reports = [slow(1), slow(2), slow(1), slow(1, phase=DATA), slow(1), {}, slow(1), slow(1)]
    assert not any(wanted.wants(found, float(second)) for second, found in enumerate(reports))
    assert wanted.wants(slow(1), 100.0)
