"""Let the machines of a job begin each attempt together, hear when one of them is lost, and decide once for all.

Vertex AI and Kubernetes replace a machine without a word to the others, whose torchruns would go on in a rendezvous
that is no more. So machine 0 listens, and each of the others holds one connection to it:

    guest → host   {"node": 3, "nodes": 4, "job": "a17"}    when it comes
    host → guest   {"begin": 2}                             when all are there; the number of the attempt
    guest → host   {"ended": 75, "leaves": true}            when its part of the attempt is over; null: a crash
    host → guest   {"over": 75}                             as soon as any part is; null: a crash, or a lost machine
    host → guest   {"again": true, "status": 75, "reason": …}

A lost machine is a closed connection; TCP's own probes find one that went away without closing. One thread: what the
others say is read whenever the caller asks.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from megavlm.errors import UserError
from megavlm.programs.launch.attempt import Decision
from megavlm.world import Node

_PROBE = 30.0  # seconds in which TCP finds that a machine is gone
_REPORT = 60.0  # seconds between two lines of a machine that waits


@dataclass(frozen=True)
class MachinePart:
    """How a machine's part of an attempt ended."""

    status: int | None  # exit status of the first rank there that ended by itself; None: a crash, and nothing is known
    gone: bool = False  # the machine was lost, or is asked for by its platform and leaves


Parts = Mapping[int, MachinePart]  # by number of the machine


class MeetingHost:
    """Machine 0 of a job.

    Args:
        decide: returns whether there is to be another attempt, given how the parts of all machines ended.
        patience: seconds after its own end within which every other part ends, too, or counts as lost.
    """

    def __init__(self, node: Node, job: str, *, decide: Callable[[Parts], Decision], patience: float) -> None:
        self._node, self._job, self._decide, self._patience = node, job, decide, patience
        self._attempt = 0
        self._guests: dict[int, _Line] = {}
        self._members: dict[int, _Line] = {}  # the guests of the attempt that runs
        self._parts: dict[int, MachinePart] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("", node.port), backlog=max(node.nodes, 16))
        self._selector.register(self._listener, selectors.EVENT_READ)

    def begin(self, idle: Callable[[], None]) -> int:
        """Wait until all machines are there and return the number of the attempt that begins. `idle` may raise."""
        report = time.monotonic() + _REPORT
        while len(self._guests) < self._node.nodes - 1:
            idle()
            self._read(0.5)
            if time.monotonic() > report:
                missing = sorted(set(range(1, self._node.nodes)) - set(self._guests))
                print(f"waits for machines {', '.join(map(str, missing))}", flush=True)
                report += _REPORT
        self._attempt += 1
        self._members, self._parts = dict(self._guests), {}
        self._tell({"begin": self._attempt})
        return self._attempt

    def over(self) -> tuple[int | None] | None:
        """Return how another machine's part of the attempt ended, in a tuple; None while all run."""
        self._read(0.0)
        return next(((part.status,) for part in self._parts.values()), None)

    def agree(self, own: MachinePart) -> Decision:
        """Say how this machine's part ended, wait for the other parts, and return the decision for all."""
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
                del self._guests[number]  # it, or the machine in its place, comes anew
        self._members = {}
        return decision

    def close(self) -> None:
        for line in [*self._guests.values()]:
            line.close()
        self._listener.close()
        self._selector.close()

    def _read(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                with suppress(OSError):
                    connection, _ = self._listener.accept()
                    self._selector.register(connection, selectors.EVENT_READ, _Line(connection))
                continue
            line: _Line = key.data
            messages = line.read()
            for message in messages or ():
                self._hear(line, message)
            if messages is None:
                self._lose(line)

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
        with suppress(KeyError, ValueError):
            self._selector.unregister(line.connection)
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
    """A machine other than 0. It waits for machine 0 as long as that takes, and comes back when that is replaced."""

    def __init__(self, node: Node, job: str) -> None:
        self._node = node
        self._hello = {"node": node.number, "nodes": node.nodes, "job": job}
        self._line: _Line | None = None
        self._heard: deque[dict[str, Any]] = deque()  # a decision and the next beginning may come together
        self._over: tuple[int | None] | None = None

    def begin(self, idle: Callable[[], None]) -> int:
        """Wait until all machines are there and return the number of the attempt that begins. `idle` may raise."""
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
                print(f"waits for machine 0 at {self._node.address}:{self._node.port}, or for others", flush=True)
                report += _REPORT

    def over(self) -> tuple[int | None] | None:
        """Return how another machine's part of the attempt ended, in a tuple; None while all run."""
        if self._over is None:
            message = self._next(0.0)
            if "over" in message:
                self._over = (message["over"],)
            elif self._line is None:
                self._over = (None,)
        return self._over

    def agree(self, own: MachinePart) -> Decision:
        """Say how this machine's part ended, and return the decision for all, which machine 0 takes."""
        if self._line is not None:
            self._line.write({"ended": own.status, "leaves": own.gone})
        while self._line is not None or self._heard:
            message = self._next(0.5)
            if "again" in message:
                return Decision(**message)
        return Decision(True, 1, "machine 0 is gone, and the job goes on with the next")

    def close(self) -> None:
        if self._line is not None:
            self._line.close()

    def _next(self, timeout: float) -> dict[str, Any]:
        """Return the next message of machine 0, empty if none has come; drop a connection that it closed."""
        if not self._heard and self._line is not None:
            messages = self._line.read(timeout)
            if messages is None:
                self._line.close()
                self._line = None
            self._heard.extend(messages or [])
        elif not self._heard:
            time.sleep(timeout)
        return self._heard.popleft() if self._heard else {}

    def _connect(self) -> None:
        with suppress(OSError):  # not there yet, or its name is not known yet
            self._line = _Line(socket.create_connection((self._node.address, self._node.port), timeout=5.0))
            self._line.write(self._hello)
            self._heard.clear()


class _Line:
    """A connection on which each line is a JSON object."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""
        connection.settimeout(5.0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in (("TCP_KEEPIDLE", _PROBE / 2), ("TCP_KEEPINTVL", _PROBE / 6), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):  # Linux has them all
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), int(seconds))

    def read(self, timeout: float = 0.0) -> list[dict[str, Any]] | None:
        """Return what has come; None if the other side closed the connection or does not speak JSON."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    return []
            received = self.connection.recv(65_536)
            if not received:
                return None
            *lines, self._rest = (self._rest + received).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        return messages if len(self._rest) < 65_536 and all(isinstance(each, dict) for each in messages) else None

    def write(self, message: Mapping[str, Any]) -> None:
        """Send a message; what cannot be sent shows when the other side is read."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        with suppress(OSError):
            self.connection.close()
