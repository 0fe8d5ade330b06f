"""Machines of a job begin together, hear of one another's end, and get one decision; sockets on the loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from megavlm.errors import UserError
from megavlm.programs.launch.attempt import Decision
from megavlm.programs.launch.meeting import Guest, MachinePart, MeetingHost, Parts
from megavlm.world import Node
from tests.support.replicas import free_ports

GO_ON = Decision(True, 1, "again")
WAIT = 20  # seconds


_began = [0.0]


@pytest.fixture(autouse=True)
def clock() -> None:
    _began[0] = time.monotonic()


def idle() -> None:
    """Nothing asks these machines to stop; but a test that waits for ever fails."""
    assert time.monotonic() - _began[0] < WAIT


class Job:
    """A host and its guests, each in a thread of its own."""

    def __init__(self, nodes: int, decide: Callable[[Parts], Decision]) -> None:
        self.node = Node(0, nodes, "127.0.0.1", free_ports(1)[0])
        self.heard: list[dict[int, MachinePart]] = []
        self._threads = ThreadPoolExecutor(2 * nodes)

        def remember(parts: Parts) -> Decision:
            self.heard.append(dict(parts))
            return decide(parts)

        self.host = MeetingHost(self.node, "job", decide=remember, patience=WAIT)
        self.guests = [self.guest(number) for number in range(1, nodes)]

    def guest(self, number: int, job: str = "job") -> Guest:
        return Guest(replace(self.node, number=number), job)

    def all(
        self, act: Callable[[MeetingHost | Guest], object], machines: list[MeetingHost | Guest] | None = None
    ) -> list[object]:
        """Do something on all machines at once; returns what each returned."""
        futures = [self._threads.submit(act, each) for each in machines or [self.host, *self.guests]]
        return [future.result(WAIT) for future in futures]

    def start(self, act: Callable[[], object]) -> Future[object]:
        return self._threads.submit(act)

    def close(self) -> None:
        for each in [self.host, *self.guests]:
            each.close()
        self._threads.shutdown(wait=False)


@contextmanager
def job_of(nodes: int, decide: Callable[[Parts], Decision] = lambda _: GO_ON) -> Iterator[Job]:
    with closing(Job(nodes, decide)) as job:
        yield job


def until_over(machine: MeetingHost | Guest) -> object:
    while (over := machine.over()) is None:
        idle()
        time.sleep(0.01)
    return over


def test_attempts_begin_and_end_together():
    with job_of(3, lambda parts: Decision(len(job.heard) < 2, 0, "enough")) as job:
        for attempt in (1, 2):
            assert job.all(lambda machine: machine.begin(idle)) == [attempt] * 3
            assert [each.over() for each in (job.host, *job.guests)] == [None] * 3
            first = job.start(lambda: job.guests[0].agree(MachinePart(75)))
            assert job.all(until_over, [job.host, job.guests[1]]) == [(75,)] * 2
            decisions = job.all(lambda machine: machine.agree(MachinePart(0)), [job.host, job.guests[1]])
            assert {*decisions, first.result(WAIT)} == {Decision(attempt < 2, 0, "enough")}
        assert job.heard[0] == {0: MachinePart(0), 1: MachinePart(75), 2: MachinePart(0)}


def test_a_lost_machine_ends_the_attempt_of_all_and_another_takes_its_place():
    with job_of(3) as job:
        job.all(lambda machine: machine.begin(idle))
        job.guests[1].close()
        assert job.all(until_over, [job.host, job.guests[0]]) == [(None,)] * 2
        job.all(lambda machine: machine.agree(MachinePart(None)), [job.host, job.guests[0]])
        assert job.heard[-1][2] == MachinePart(None, gone=True)
        job.guests[1] = job.guest(2)
        assert job.all(lambda machine: machine.begin(idle)) == [2] * 3


def test_a_machine_that_leaves_is_waited_for():
    """It says that it goes, so that no attempt begins with a connection that is about to close."""
    with job_of(2) as job:
        job.all(lambda machine: machine.begin(idle))
        leaves = job.start(lambda: job.guests[0].agree(MachinePart(75, gone=True)))
        job.host.agree(MachinePart(75))
        assert leaves.result(WAIT) == GO_ON
        host = job.start(lambda: job.host.begin(idle))
        time.sleep(0.3)
        assert not host.done()
        job.guests[0].close()
        job.guests[0] = job.guest(1)
        assert job.guests[0].begin(idle) == host.result(WAIT) == 2


def test_a_machine_that_comes_twice_was_replaced():
    """TCP has not noticed that the first is gone."""
    with job_of(2) as job, closing(job.guest(1)) as second:
        job.all(lambda machine: machine.begin(idle))
        coming = job.start(lambda: second.begin(idle))
        assert until_over(job.host) == (None,)
        job.host.agree(MachinePart(None))
        assert job.heard[-1][1] == MachinePart(None, gone=True)
        assert job.host.begin(idle) == coming.result(WAIT) == 2


def test_guests_outlive_machine_0():
    with job_of(2) as job:
        job.all(lambda machine: machine.begin(idle))
        job.host.close()
        assert until_over(job.guests[0]) == (None,)
        assert job.guests[0].agree(MachinePart(None)).again
        job.host = MeetingHost(job.node, "job", decide=lambda _: GO_ON, patience=WAIT)
        assert job.all(lambda machine: machine.begin(idle)) == [1, 1]


def test_a_machine_of_another_job_is_refused_and_a_stranger_ignored():
    with job_of(2) as job, socket.create_connection(("127.0.0.1", job.node.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        begun = job.start(lambda: job.host.begin(idle))
        with (
            closing(job.guest(1, job="another")) as wrong,
            pytest.raises(UserError, match="one of 2 of job job") as told,
        ):
            wrong.begin(idle)
        assert "\n" not in str(told.value)
        assert job.guests[0].begin(idle) == begun.result(WAIT) == 1


def test_waiting_ends_when_the_machine_is_asked_for():
    asked = threading.Event()

    def look() -> None:
        if asked.is_set():
            raise InterruptedError

    with job_of(2) as job, closing(job.guest(1)) as guest:
        job.host.close()
        waiting = job.start(lambda: guest.begin(look))
        asked.set()
        with pytest.raises(InterruptedError):
            waiting.result(WAIT)
