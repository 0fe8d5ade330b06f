"""How a run ends, and who may end it: its status, its lock, signals, and steps that are bad."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import datetime
from multiprocessing import Process
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megavlm.command_line.parsing import parse
from megavlm.errors import BadNumbers, Stopped, UserError
from megavlm.resilience import lock, signals
from megavlm.resilience.bad_steps import LEAST, WINDOW, BadSteps, iterations
from megavlm.resilience.events import (
    FILE,
    KINDS,
    STOPPED,
    events,
    note_failure,
    read_status,
    record,
    wait_as_spare,
    write_status,
)
from megavlm.resilience.lock import RunLock
from megavlm.resilience.phases import STARTING, StartTimes, unfinished
from megavlm.resilience.signals import SIGNALS, how_it_ended, listen
from megavlm.rules.check import usable_world
from tests.support.training import SMALL


def test_what_is_known_stays_and_the_end_is_told(tmp_path: Path):
    write_status(tmp_path, "running", iteration=3, train_iters=9, checkpoint="iter_3")
    assert read_status(tmp_path)["exit_status"] is None
    write_status(tmp_path, "stopped", iteration=4, reason="SIGTERM received")
    status = read_status(tmp_path)
    assert {name: status[name] for name in ("iteration", "train_iters", "checkpoint", "reason")} == {
        "iteration": 4,
        "train_iters": 9,
        "checkpoint": "iter_3",
        "reason": "SIGTERM received",
    }
    assert status["exit_status"] == STOPPED
    write_status(tmp_path, "finished", iteration=9)
    assert (read_status(tmp_path)["exit_status"], read_status(tmp_path)["reason"]) == (0, None)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (UserError("wrong"), 2, "wrong"),
        (BadNumbers("not finite"), 3, "not finite"),
        (KeyError("x"), 1, "KeyError: 'x'"),
    ],
)
def test_the_first_error_of_an_attempt_is_the_cause(error, status, reason, tmp_path, monkeypatch):
    note_failure(tmp_path, error)
    note_failure(tmp_path, RuntimeError("connection closed by peer"))
    assert (read_status(tmp_path)["exit_status"], read_status(tmp_path)["reason"]) == (status, reason)
    assert len(events(tmp_path)) == 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    note_failure(tmp_path, RuntimeError("connection closed by peer"))
    assert read_status(tmp_path)["reason"] == "RuntimeError: connection closed by peer"


def test_ranks_that_fail_at_once_are_one_failure(tmp_path: Path) -> None:
    def slowly(folder: Path) -> dict[str, Any]:
        found = read_status(folder)
        time.sleep(0.1)
        return found

    with patch("megavlm.resilience.events.read_status", slowly):
        ranks = [threading.Thread(target=note_failure, args=(tmp_path, UserError(f"rank {each}"))) for each in range(3)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    assert [event["kind"] for event in events(tmp_path)] == ["failure"]


@pytest.mark.parametrize(
    ("flags", "launched", "used"),
    [
        ("--spare-ranks --gbs 8", 3, 2),
        ("--spare-ranks --gbs 12", 5, 4),
        ("--spare-ranks --gbs 8 --tp 2", 7, 4),
        ("--spare-ranks --gbs 8 --tp 2", 1, 1),  # refused: TP needs 2
        ("--spare-ranks --gbs 8", 8, 8),
        ("--gbs 8", 3, 3),
        ("--spare-ranks --micro-batch-size 0", 3, 3),
    ],
)
def test_as_many_ranks_train_as_can(flags: str, launched: int, used: int):
    assert usable_world(parse([*SMALL, *flags.split()]), launched) == used


@pytest.mark.parametrize(("state", "raised"), [("finished", None), ("stopped", Stopped), ("failed", SystemExit)])
def test_a_spare_rank_ends_with_the_run_and_not_with_an_earlier_one(state, raised, tmp_path, monkeypatch):
    monkeypatch.setattr("megavlm.resilience.events._PAUSE", 0.01)
    write_status(tmp_path, state, iteration=3)
    ended: list[BaseException | None] = []

    def wait() -> None:
        try:
            wait_as_spare(tmp_path, before)
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    before = read_status(tmp_path)
    thread = threading.Thread(target=wait)
    thread.start()
    write_status(tmp_path, "running", iteration=3)
    thread.join(0.2)
    assert not ended
    write_status(tmp_path, state, iteration=5)
    thread.join(60)
    assert [type(each) for each in ended] == [type(None) if raised is None else raised]


ROOT = Path(__file__).parents[3]


def test_an_event_says_when_who_and_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    record(tmp_path, "save", iteration=10, seconds=1.5, folder=tmp_path)
    record(tmp_path, "stop", reason="SIGTERM")
    save, stop = events(tmp_path)
    assert datetime.fromisoformat(save.pop("time")).tzinfo is not None
    assert save == {
        "kind": "save", "attempt": 2, "rank": 3, "iteration": 10, "seconds": 1.5, "folder": str(tmp_path)
    }  # fmt: skip
    assert stop["reason"] == "SIGTERM"
    assert "iteration" not in stop


def _write(folder: Path, number: int) -> None:
    for i in range(200):
        record(folder, "worker", iteration=i, reason=str(number) * 500)


def test_lines_of_several_processes_do_not_mix(tmp_path: Path):
    writers = [Process(target=_write, args=(tmp_path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(events(tmp_path)) == len((tmp_path / FILE).read_bytes().splitlines()) == 800


def test_a_line_that_was_cut_off_hides_no_other(tmp_path: Path):
    record(tmp_path, "start", iteration=0)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"time": "20\n[1]\n')
    record(tmp_path, "finish", iteration=1)
    assert [event["kind"] for event in events(tmp_path)] == ["start", "finish"]


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record(tmp_path / "not there", "start")
    assert "cannot be written" in capsys.readouterr().err
    assert events(tmp_path / "not there") == []


def test_the_page_lists_every_kind():
    page = (ROOT / "docs/long-runs.md").read_text()
    section = page.split("## Events")[1].split("\n## ")[0]
    assert re.findall(r"^\| `([a-z_]+)` \| .+ \|$", section, re.MULTILINE) == list(KINDS)


def test_the_parts_of_a_start_are_written_once(tmp_path: Path) -> None:
    now = [100.0]
    times = StartTimes(98.0, lambda: now[0])
    times.enter("rendezvous")
    times.run_dir = tmp_path
    for part, second in (("model", 101.0), ("weights", 103.0), ("model", 195.0), ("first_step", 196.0)):
        now[0] = second
        times.enter(part)
        assert unfinished(tmp_path)["part"] == part
        assert unfinished(tmp_path)["since"] == second
    now[0] = 200.0
    times.first_step_done(1, waited=1.5)
    times.enter("first_step")
    times.first_step_done(2, waited=0.0)
    (event,) = events(tmp_path)
    assert (event["kind"], event["iteration"], event["seconds"]) == ("started", 1, 102.0)
    assert event["phases"] == {
        **{"imports": 2.0, "rendezvous": 1.0, "model": 3.0, "weights": 92.0},
        **{"first_batch": 1.5, "first_step": 2.5},
    }
    assert not (tmp_path / STARTING).exists()
    assert unfinished(tmp_path) == {}


def test_other_ranks_and_what_is_no_start_say_nothing(tmp_path: Path) -> None:
    times = StartTimes(0.0)
    times.enter("model")
    times.first_step_done(1, waited=0.0)
    assert [*tmp_path.iterdir()] == []
    for text in ("", "[]", '{"part": ["\\u001b"]}', '{"part": "unknown"}'):
        (tmp_path / STARTING).write_text(text)
        assert unfinished(tmp_path) == {}


CONTEXT = multiprocessing.get_context("fork")


def hold(run_dir: Path, ready, *, beat: float) -> None:
    with patch.object(lock, "_BEAT", beat):
        RunLock(run_dir).acquire()
        ready.set()
        signal.pause()


@pytest.fixture
def owner(tmp_path: Path):
    """A process that holds the lock of `tmp_path`."""
    ready = CONTEXT.Event()
    process = CONTEXT.Process(target=hold, args=(tmp_path, ready), kwargs={"beat": 0.05})
    process.start()
    assert ready.wait(60)
    yield process
    process.kill()
    process.join()


def test_a_living_run_keeps_its_folder(owner, tmp_path: Path):
    with pytest.raises(UserError, match=rf"process {owner.pid} on .*--run-dir"):
        RunLock(tmp_path).acquire()


def test_a_dead_run_is_replaced(owner, tmp_path: Path):
    owner.kill()
    owner.join()
    mine = RunLock(tmp_path)
    mine.acquire()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert [event["kind"] for event in events(tmp_path)] == ["takeover"]
    mine.release()
    RunLock(tmp_path).acquire()  # nothing to take over after a release
    assert len(events(tmp_path)) == 1


def test_the_kernel_still_holds_what_was_looked_at(owner, tmp_path: Path, monkeypatch):
    """Closing any descriptor of a file drops the process's locks on it, and reading a heartbeat closes one. The lock
    must survive that, also after a takeover."""
    owner.kill()
    owner.join()
    monkeypatch.setattr(lock, "_boot", lambda: "another machine")
    monkeypatch.setattr(lock, "_SILENCE", 0.2)
    mine = RunLock(tmp_path)
    mine.acquire()
    asked = CONTEXT.Process(target=expect_refusal, args=(tmp_path,))
    asked.start()
    asked.join()
    assert asked.exitcode == 0
    mine.release()


def expect_refusal(run_dir: Path) -> None:
    with pytest.raises(UserError):
        RunLock(run_dir).acquire()


@pytest.mark.parametrize("alive", [True, False])
def test_without_the_kernels_lock_a_heartbeat_is_looked_for(owner, tmp_path, monkeypatch, alive):
    """As on shared storage that does not pass locks on."""
    monkeypatch.setattr(lock, "_lock", lambda _: False)
    monkeypatch.setattr(lock, "_SILENCE", 2.0)
    mine = RunLock(tmp_path)
    if alive:
        with pytest.raises(UserError, match=str(owner.pid)):
            mine.acquire()
        return
    owner.kill()
    owner.join()
    mine.acquire()
    mine.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "\\ud800", "machine": 3}', "[" * 100_000])
def test_a_lock_that_says_nothing_is_nobodys(tmp_path: Path, content: str):
    (tmp_path / "lock").write_text(content)
    with patch.object(lock, "_SILENCE", 0.1):
        RunLock(tmp_path).acquire()


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(UserError, match="--run-dir"):
        RunLock(tmp_path / "missing").acquire()


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.with_name("other"))])
def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], object]):
    (tmp_path / "other").write_text("kept")
    make(tmp_path / "lock")
    with pytest.raises(
        UserError, match=r"--run-dir: \S*/lock cannot be written .*: move it away, or name another folder"
    ):
        RunLock(tmp_path).acquire()
    assert (tmp_path / "other").read_text() == "kept"


def beat(run_dir: Path, told, damage: Callable[[Path], object]) -> None:
    """Lock a folder, change it as the test asks, and send what the lock reports, "" if nothing within a second."""
    with patch.object(lock, "_BEAT", 0.02):
        mine = RunLock(run_dir)
        mine.acquire()
        mine.when_lost(told.send)
        damage(run_dir)
        time.sleep(1)
        told.send("")
        mine.release()


def of_another_machine(run_dir: Path) -> None:
    owner = json.loads((run_dir / "lock").read_text())
    file = os.open(run_dir / "lock", os.O_WRONLY)
    lock._write(file, {**owner, "machine": "another", "host": "other", "pid": 77})


def rename(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))


def replace(run_dir: Path) -> None:
    """By another run."""
    (run_dir.with_name("new")).mkdir()
    (run_dir.with_name("new") / "lock").write_text(json.dumps({"host": "other", "pid": 77}))
    run_dir.rename(run_dir.with_name("moved"))
    run_dir.with_name("new").rename(run_dir)


@pytest.mark.parametrize(
    ("damage", "status", "said"),
    [(of_another_machine, 1, None), (rename, 0, "lock is gone"), (replace, 1, None), (Path.iterdir, 0, "")],
)
def test_an_owner_notices_that_it_no_longer_owns_its_folder(tmp_path, damage, status, said):
    """A run that was suspended while another machine's run took its folder over must not write there again."""
    (tmp_path / "run").mkdir()
    told, heard = CONTEXT.Pipe()
    process = CONTEXT.Process(target=beat, args=(tmp_path / "run", heard, damage))
    process.start()
    heard.close()
    process.join(60)
    assert process.exitcode == status
    if said is not None:
        heard_of = told.recv()
        assert said in heard_of if said else not heard_of


PATIENCE = 60


def rank(told, *, phase: str = "training", same_request: float = 5.0, orphan: tuple[int, float] | None = None) -> None:
    """A process that trains, in C code that runs no Python, until it sees that it was asked to stop."""
    signals._SAME_REQUEST = same_request
    parent, patience = orphan or (None, 0.0)
    stop = listen(parent=parent, patience=patience)
    if phase == "training":
        stop.training()
    told.send(os.getpid())
    while not (stop.requested and orphan is None and same_request > 1):
        time.sleep(0.05)
    told.send(stop.reason)
    time.sleep(0.5)  # for further signals
    os._exit(0)


def started(**options: object):
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=rank, args=(theirs,), kwargs=options)
    process.start()
    assert ours.recv() == process.pid
    return process, ours


@pytest.mark.parametrize("number", SIGNALS)
def test_any_of_the_signals_asks_and_a_second_one_is_the_same_request(number: signal.Signals):
    process, ours = started()
    for each in (number, signal.SIGTERM, number):
        os.kill(process.pid, each)
        time.sleep(0.05)
    assert ours.recv().endswith("received")
    process.join(PATIENCE)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    "numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM)]
)
def test_a_later_signal_ends_at_once_but_not_the_sigterm_after_a_warning(numbers: tuple[signal.Signals, ...]):
    """SLURM: `--signal=USR1@60`, and SIGTERM when the time is over."""
    process, _ = started(same_request=0.2)
    for number in numbers:
        assert process.is_alive()
        os.kill(process.pid, number)
        time.sleep(0.4)
    process.join(PATIENCE)
    assert process.exitcode == 1


def test_before_training_there_is_nothing_to_save():
    process, _ = started(phase="starting")
    os.kill(process.pid, signal.SIGUSR2)
    process.join(PATIENCE)
    assert process.exitcode == STOPPED


def finish(told, *, asked_before: bool) -> None:
    """A process that has saved all that it will, and then ends by itself."""
    stop = listen(parent=None, patience=0.0)
    stop.training()
    told.send(os.getpid())
    while asked_before and not stop.requested:
        time.sleep(0.02)
    (stop.saved if asked_before else stop.closing)()
    told.send("saved")
    time.sleep(1.0)
    told.send(stop.reason)
    os._exit(0)


@pytest.mark.parametrize(("asked_before", "status"), [(True, STOPPED), (False, 0)])
def test_after_the_last_save(asked_before: bool, status: int):
    """A request that came too late for the loop ends the final evaluation; one in the very end changes nothing."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=finish, args=(theirs,), kwargs={"asked_before": asked_before})
    process.start()
    ours.recv()
    if not asked_before:
        ours.recv()
    os.kill(process.pid, signal.SIGTERM)
    process.join(PATIENCE)
    assert process.exitcode == status
    if not asked_before:
        assert ours.recv() is None, "nothing is requested of a process that ends"


def ignoring(told) -> None:
    """A process that nohup started."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    rank(told)


def test_what_was_ignored_from_the_beginning_stays_ignored():
    heard, told = CONTEXT.Pipe()
    process = CONTEXT.Process(target=ignoring, args=(told,))
    process.start()
    heard.recv()
    os.kill(process.pid, signal.SIGHUP)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGTERM)
    assert heard.recv() == "SIGTERM received"
    process.join(PATIENCE)


def test_a_process_whose_parent_is_gone_is_asked_and_then_ends():
    """Even if it waits for ever, as in a collective."""
    process, _ = started(orphan=(1, 1.5))
    process.join(PATIENCE)
    assert process.exitcode == 1


def sleep() -> None:
    time.sleep(300)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os._exit(0), "ended with status 0"),
        (lambda: os._exit(7), "ended with status 7"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL"),
    ],
)
def test_words(end: object, words: str) -> None:
    process = CONTEXT.Process(target=end)
    process.start()
    assert how_it_ended(process) == words


def test_another_thread_was_given_the_status_and_keeps_it_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes the status of the dead process first, as it does when it starts a process."""
    given, asked, system = threading.Event(), threading.Event(), os.waitpid

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        if threading.current_thread() is not other:
            asked.set()
            return system(pid, options)  # no such child any more
        found = system(pid, 0)
        given.set()
        assert asked.wait(60)
        time.sleep(0.05)
        return found

    process = CONTEXT.Process(target=sleep)
    process.start()
    other = threading.Thread(target=multiprocessing.active_children)
    monkeypatch.setattr(os, "waitpid", waitpid)
    process.kill()
    other.start()
    assert given.wait(60)
    assert how_it_ended(process) == "was ended by SIGKILL"
    other.join()


def test_a_process_that_does_not_end_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megavlm.resilience.signals._MOMENT", 0.01)
    process = CONTEXT.Process(target=sleep)
    process.start()
    assert how_it_ended(process, timeout=0.01) == "was lost"
    process.kill()
    process.join()


def steps(count: int, norm: float = 1.0, factor: float = 10.0) -> BadSteps:
    found = BadSteps(factor)
    for _ in range(count):
        found.good(norm)
    return found


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_bad_even_where_fp16_overflowed(loss: float) -> None:
    assert BadSteps(0).reason(loss, None) == f"the loss is {loss}"
    assert BadSteps(0).reason(1.0, loss) == f"the gradient norm is {loss}"
    assert BadSteps(0).reason(1.0, None) is None


def test_a_spike_is_beyond_the_factor_times_the_median_of_enough_steps() -> None:
    assert steps(LEAST - 1).reason(1.0, 1e9) is None
    assert steps(LEAST).reason(1.0, 10.0) is None
    assert "10.1 times the median of the last 16 steps" in str(steps(LEAST).reason(1.0, 10.1))
    assert steps(LEAST, factor=0.0).reason(1.0, 1e30) is None
    assert steps(LEAST, norm=0.0).reason(1.0, 1.0) is None, "batches without trained tokens say nothing"


def test_the_median_follows_good_steps_alone() -> None:
    found = steps(WINDOW)
    for _ in range(WINDOW // 2 + 1):
        found.good(100.0)
    assert found.reason(1.0, 900.0) is None
    for _ in range(WINDOW):
        found.bad()
    assert found.reason(1.0, 900.0) is None
    assert (found.in_a_row, found.skipped) == (WINDOW, WINDOW)
    found.left_out()
    assert found.in_a_row == WINDOW
    found.good(1.0)
    assert (found.in_a_row, found.skipped) == (0, WINDOW + 1)


def test_a_checkpoint_keeps_what_is_decided_by() -> None:
    found = steps(40, norm=0.1)
    found.bad()
    other = BadSteps(10.0)
    other.load_state_dict(json.loads(json.dumps(found.state_dict())))
    assert other == found
    other.load_state_dict({})
    assert other == BadSteps(10.0)


def test_going_back_counts_what_is_left_out_and_the_bad_steps_in_a_row() -> None:
    found = steps(20)
    state = found.state_dict()
    for norm in (2.0, 3.0):
        found.good(norm)
    found.bad()
    found.go_back(state, left_out=3)
    assert (list(found.norms), found.in_a_row, found.skipped) == ([1.0] * 20, 1, 3)


def test_iterations_are_numbers_and_ranges() -> None:
    assert iterations(("12", "40-42,7", "9-9")) == {12, 40, 41, 42, 7, 9}
    assert iterations(()) == frozenset()


@pytest.mark.parametrize("text", ["0", "-3", "5-3", "a", "1-2-3", "4-", "1.5", "²"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        iterations((text,))
