"""Decode parquet in a process with bounds of time and memory (`parquet_process.py`), which may crash."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import Any

from megavlm.errors import UserError

SECONDS = 60  # of processor time for a row group
MEMORY = 2**31  # bytes of address space while a row group is decoded, beyond what Python and Arrow have
DECODED = 2**31  # most bytes of a decoded row group
_PROGRAM = Path(__file__).with_name("parquet_process.py")  # not imported: it needs pyarrow, which may be missing


class ParquetError(ValueError):
    """The file is damaged, or larger than it may be once it is decoded."""


def describe(path: Path) -> tuple[list[int], list[str]]:
    """Return the rows of each row group, and the names of the columns. Raises ParquetError."""
    (rows, names), _ = _DECODER.ask([str(path.absolute())])
    return rows, names


def row_group(path: Path, number: int, columns: list[str]) -> Any:
    """Return a decoded row group, a table of Arrow whose memory is the process's file. Raises ParquetError."""
    import pyarrow as pa

    size, file = _DECODER.ask([str(path.absolute()), number, columns])
    try:
        memory = mmap.mmap(file, size, access=mmap.ACCESS_READ)
    finally:
        os.close(file)
    return pa.ipc.open_stream(pa.py_buffer(memory)).read_all()


class _Decoder:
    """The process that decodes for this one, started when first asked. Threads take turns, forks have their own."""

    _process: subprocess.Popen[bytes] | None = None
    _channel: socket.socket | None = None

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def ask(self, request: list[Any]) -> tuple[Any, int]:
        """Return the result and the file that comes along, -1 for none. Raises ParquetError."""
        with self._lock:
            for _ in range(2):  # the second time for a process that someone else has ended
                reply, file, status = self._exchange(json.dumps(request).encode() + b"\n")
                if reply:
                    result, error = json.loads(reply)
                    if error is not None:
                        raise ParquetError(error)
                    return result, file
                if status == -signal.SIGPROF:
                    raise ParquetError(f"it takes more than {SECONDS} s of processor time")
                if status not in (0, -signal.SIGKILL, -signal.SIGTERM):
                    break  # a crash, which it would repeat
        raise ParquetError(f"it ends the process that decodes it (status {status})")

    def _exchange(self, line: bytes) -> tuple[bytes, int, int]:
        """Return (reply, file, 0), or (b"", -1, exit status) where the process has ended."""
        if self._process is None:
            self._start()
        process, channel = self._process, self._channel
        assert process is not None
        assert channel is not None
        files: list[int] = []
        try:
            channel.sendall(line)
            reply, files, _, _ = socket.recv_fds(channel, 2**16, 1)
            while reply and not reply.endswith(b"\n"):
                more = channel.recv(2**20)
                reply = reply + more if more else b""
        except (BrokenPipeError, ConnectionResetError):
            reply = b""
        if reply:
            return reply, (files or [-1])[0], 0
        for file in files:
            os.close(file)
        channel.close()
        self._process = self._channel = None
        return b"", -1, process.wait()

    def _start(self) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise UserError("--datasets has parquet files, which need pyarrow: pip install pyarrow") from error
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *map(str, (_PROGRAM, theirs.fileno(), SECONDS, MEMORY, DECODED))],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._channel = ours

    def _forget(self) -> None:
        self._lock = Lock()
        self._process = self._channel = None


_DECODER = _Decoder()
