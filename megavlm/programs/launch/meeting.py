"""Synchronize the machines of a job: begin each attempt together, detect lost machines, share one decision to restart.

Vertex AI and Kubernetes replace a machine without notice to the others, whose torchruns would wait in a rendezvous
that no longer exists. So machine 0 (the host) listens, and each other machine (a guest) holds one connection to it:

    guest → host   {"node": 3, "nodes": 4, "job": "a17"}    when the guest connects
    host → guest   {"begin": 2}                             when all machines are there; the number of the attempt
    guest → host   {"ended": 75, "leaves": true}            when the guest's part of the attempt ends; null: a crash
    host → guest   {"over": 75}                             when the first part ends; null: a crash, or a lost machine
    host → guest   {"again": true, "status": 75, "reason": …}

A closed connection means a lost machine; TCP keepalive detects a machine that vanished without closing. A thread per
connection puts messages into a queue, which is read whenever the caller asks.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from megavlm.errors import UserError
from megavlm.programs.launch.attempt import Decision
from megavlm.world import Node

_PROBE = 30.0  # seconds in which TCP keepalive detects that a machine is gone
_REPORT = 60.0  # seconds between two reports of a machine that waits


@dataclass(frozen=True)
class MachinePart:
    """How a machine's part of an attempt ended."""

    status: int | None  # exit status of the machine's first rank that exited on its own; None: crash or unknown
    gone: bool = False  # the machine was lost, or leaves because its platform asked for it


Parts = Mapping[int, MachinePart]  # by number of the machine


class MeetingHost:
    """The side of machine 0, which listens to all other machines of a job.

    Args:
        decide: returns the decision whether to start another attempt, given how the parts of all machines ended.
        patience: seconds that other machines have to end their part after this machine; after them they count as lost.
    """

    def __init__(self, node: Node, job: str, *, decide: Callable[[Parts], Decision], patience: float) -> None:
        self._node, self._job, self._decide, self._patience = node, job, decide, patience
        self._attempt = 0
        self._guests: dict[int, _Line] = {}
        self._members: dict[int, _Line] = {}  # the guests that take part in the current attempt
        self._parts: dict[int, MachinePart] = {}
        self._heard: Heard = queue.SimpleQueue()
        self._listener = socket.create_server(("", node.port), backlog=max(node.nodes, 16))
        threading.Thread(target=self._accept, daemon=True).start()

    def begin(self, idle: Callable[[], None]) -> int:
        """Wait until all machines are there and return the number of the attempt that begins.

        `idle` is called while waiting, and may raise to give up.
        """
        report = time.monotonic() + _REPORT
        while len(self._guests) < self._node.nodes - 1:
            idle()
            self._read(0.5)
            if time.monotonic() > report:
                missing = sorted(set(range(1, self._node.nodes)) - set(self._guests))
                print(f"waiting for machines {', '.join(map(str, missing))}", flush=True)
                report += _REPORT
        self._attempt += 1
        self._members, self._parts = dict(self._guests), {}
        self._tell({"begin": self._attempt})
        return self._attempt

    def over(self) -> tuple[int | None] | None:
        """Return the status of the first other machine whose part ended, in a tuple; None while all parts run."""
        self._read(0.0)
        return next(((part.status,) for part in self._parts.values()), None)

    def agree(self, own: MachinePart) -> Decision:
        """Report how machine 0's part ended, wait for the other parts, and return the decision for all machines."""
        self._note(0, own)
        limit = time.monotonic() + self._patience
        while len(self._parts) < self._node.nodes and time.monotonic() < limit:
            self._read(0.5)
        for number in set(self._members) - set(self._parts):
            self._close(number, self._members[number])
        decision = self._decide(self._parts)
        self._tell(asdict(decision))
        for number, line in self._members.items():
            if self._parts[number].gone and self._guests.get(number) is line:
                del self._guests[number]  # this machine, or its replacement, connects again
        self._members = {}
        return decision

    def close(self) -> None:
        for line in self._guests.values():
            line.close()
        _shut(self._listener)

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            with suppress(OSError):
                _Line(self._listener.accept()[0], self._heard)

    def _read(self, timeout: float) -> None:
        """Handle all messages in the queue; wait up to `timeout` seconds for the first."""
        with suppress(queue.Empty):
            while True:
                line, message = self._heard.get(timeout=timeout)
                timeout = 0.0
                if message is None:
                    self._lose(line)
                else:
                    self._hear(line, message)

    def _hear(self, line: _Line, message: Mapping[str, Any]) -> None:
        if "node" in message:
            number = message["node"]
            expected = {"node": number, "nodes": self._node.nodes, "job": self._job}
            if message != expected or number not in range(1, self._node.nodes):
                line.write({"refused": f"machine 0 is one of {self._node.nodes} of job {self._job}"})
                self._lose(line)
                return
            if number in self._guests:  # its machine was replaced before TCP noticed
                self._close(number, self._guests[number])
            self._guests[number] = line
        elif "ended" in message:
            for number, member in self._members.items():
                if member is line:
                    self._note(number, MachinePart(message["ended"], gone=bool(message["leaves"])))

    def _lose(self, line: _Line) -> None:
        line.close()
        for number, each in list(self._guests.items()):
            if each is line:
                del self._guests[number]
        for number, each in list(self._members.items()):
            if each is line and number not in self._parts:
                self._note(number, MachinePart(None, gone=True))

    def _close(self, number: int, line: _Line) -> None:
        print(f"machine {number} is lost", flush=True)
        self._lose(line)

    def _note(self, number: int, part: MachinePart) -> None:
        first = not self._parts
        self._parts[number] = part
        if first:
            self._tell({"over": part.status})

    def _tell(self, message: Mapping[str, Any]) -> None:
        for line in list(self._members.values()):
            line.write(message)


class Guest:
    """The side of a machine other than 0. It waits for machine 0 without limit, and reconnects to a replacement."""

    def __init__(self, node: Node, job: str) -> None:
        self._node = node
        self._hello = {"node": node.number, "nodes": node.nodes, "job": job}
        self._line: _Line | None = None
        self._heard: Heard = queue.SimpleQueue()
        self._over: tuple[int | None] | None = None

    def begin(self, idle: Callable[[], None]) -> int:
        """Wait until all machines are there and return the number of the attempt that begins.

        `idle` is called while waiting, and may raise to give up.
        """
        report = time.monotonic() + _REPORT
        while True:
            idle()
            if self._line is None:
                self._connect()
            message = self._next(0.5)
            if "refused" in message:
                raise UserError(f"{message['refused']}, and this is machine {self._hello}")
            if "begin" in message:
                self._over = None
                return int(message["begin"])
            if time.monotonic() > report:
                print(f"waiting for machine 0 at {self._node.address}:{self._node.port}, or for others", flush=True)
                report += _REPORT

    def over(self) -> tuple[int | None] | None:
        """Return the status of the first other machine whose part ended, in a tuple; None while all parts run."""
        if self._over is None:
            message = self._next(0.0)
            if "over" in message:
                self._over = (message["over"],)
            elif self._line is None:
                self._over = (None,)
        return self._over

    def agree(self, own: MachinePart) -> Decision:
        """Report how this machine's part ended, and return machine 0's decision for all machines."""
        if self._line is not None:
            self._line.write({"ended": own.status, "leaves": own.gone})
        while self._line is not None:
            message = self._next(0.5)
            if "again" in message:
                return Decision(**message)
        return Decision(True, 1, "machine 0 is gone, and the job goes on with the next")

    def close(self) -> None:
        if self._line is not None:
            self._line.close()

    def _next(self, timeout: float) -> Mapping[str, Any]:
        """Return the next message of machine 0, empty if none arrives in time; drop a closed connection."""
        try:
            line, message = self._heard.get(timeout=timeout)
        except queue.Empty:
            return {}
        if message is None and line is self._line:
            line.close()
            self._line = None
        return message or {}

    def _connect(self) -> None:
        with suppress(OSError):  # machine 0 is not there yet, or its name cannot be resolved yet
            connection = socket.create_connection((self._node.address, self._node.port), timeout=5.0)
            self._line = _Line(connection, self._heard)
            self._line.write(self._hello)


class _Line:
    """A connection on which each line is a JSON object.

    Each message is put into `heard`; None follows when the other side closes the connection or sends no JSON.
    """

    def __init__(self, connection: socket.socket, heard: Heard) -> None:
        self._connection, self._heard = connection, heard
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in ((socket.TCP_KEEPIDLE, _PROBE / 2), (socket.TCP_KEEPINTVL, _PROBE / 6)):
            connection.setsockopt(socket.IPPROTO_TCP, option, int(seconds))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError, ValueError, TypeError), self._connection.makefile("rb") as lines:
            while line := lines.readline(65_536):
                self._heard.put((self, dict(json.loads(line))))
        self._heard.put((self, None))

    def write(self, message: Mapping[str, Any]) -> None:
        """Send a message. Errors are ignored here: reading then shows that the connection is lost."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        _shut(self._connection)


Heard = queue.SimpleQueue[tuple[_Line, Mapping[str, Any] | None]]


def _shut(connection: socket.socket) -> None:
    """Close a socket and wake the thread that waits for it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
