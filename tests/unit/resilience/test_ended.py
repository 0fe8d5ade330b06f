"""A process's end is told in words, whichever thread of this process was given its status."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

from megavlm.resilience.signals import how_it_ended

FORK = multiprocessing.get_context("fork")


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
    process = FORK.Process(target=end)
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

    process = FORK.Process(target=sleep)
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
    process = FORK.Process(target=sleep)
    process.start()
    assert how_it_ended(process, timeout=0.01) == "was lost"
    process.kill()
    process.join()
