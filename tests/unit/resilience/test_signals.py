"""Who may ask a run to stop, how often, and what becomes of a process whose torchrun is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

from megavlm.resilience import signals
from megavlm.resilience.signals import SIGNALS, how_it_ended, listen
from megavlm.resilience.status import STOPPED

CONTEXT = multiprocessing.get_context("fork")
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
