"""The program that decodes parquet: in a process with little memory and time, which may crash.

A few bytes of a parquet file may stand for any number of rows, of values in a row, or of bytes in a value, and none of
these is declared: only decoding tells. Arrow has no bound for that, but the system has, for this process alone. It is
started by `megavlm.data.records.parquet_decoder`, imports nothing of megavlm, and ends with its input. Each request on
the socket is a line of JSON, `[path]` or `[path, row group, columns]`. The answer is a line of JSON, `[result, error]`,
one of which is null: of the first the rows of each row group and the names of the columns, of the second the bytes of
the decoded rows, which are Arrow's stream format in a file in memory that comes along.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_BATCH_ROWS, _BATCH_BYTES = 1024, 2**25  # most rows that are decoded at once, and bytes that they should have
_READ = 2**20  # bytes of a column that are read at once
_open: dict[tuple[Any, ...], Any] = {}  # the file that was decoded last


def describe(path: str) -> list[Any]:
    """Return the rows of each row group, and the names of the columns."""
    metadata = pq.read_metadata(path)
    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    # A table of nothing but nulls is far smaller, and is no data set.
    if any(count < 0 for count in rows) or sum(rows) > 2**20 + 8 * os.path.getsize(path):
        raise ValueError(f"it says that it has {sum(rows)} rows, too many for its size")
    return [rows, metadata.schema.to_arrow_schema().names]


def decode(path: str, group: int, columns: list[str]) -> tuple[int, int]:
    """Return a file in memory with a decoded row group, and its length."""
    found = os.stat(path)
    key = (path, found.st_mtime_ns, found.st_size)
    if key not in _open:
        _open.clear()
        _open[key] = pq.ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=_READ)
    file = _open[key]
    described = file.metadata.row_group(group)
    declared = sum(described.column(at).total_uncompressed_size for at in range(described.num_columns))
    rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * described.num_rows // max(declared, 1)))
    target = os.memfd_create("parquet")
    try:
        with os.fdopen(os.dup(target), "wb") as sink, pa.ipc.new_stream(sink, _schema(file, columns)) as stream:
            for batch in file.iter_batches(rows, [group], columns=columns, use_threads=False):
                stream.write_batch(batch)
    except BaseException:
        os.close(target)
        raise
    return target, os.fstat(target).st_size


def _schema(file: Any, columns: list[str]) -> Any:
    schema = file.schema_arrow
    return pa.schema([schema.field(name) for name in schema.names if name in columns], metadata=schema.metadata)


def answer(request: list[Any]) -> tuple[list[Any], list[int]]:
    """Return the answer to a request, and the file that comes along."""
    try:
        if len(request) == 1:
            return [describe(*request), None], []
        target, size = decode(*request)
        return [size, None], [target]
    except MemoryError:  # Arrow's is one, too
        return [None, "it needs too much memory while it is decoded: write smaller row groups"], []
    except Exception as error:  # whatever a damaged file does
        if isinstance(error, OSError) and "File too large" in str(error):
            return [None, "it is too large once it is decoded: write smaller row groups"], []
        return [None, str(error).strip().partition("\n")[0][:300] or type(error).__name__], []


def main(descriptor: int, seconds: int, memory: int, decoded: int) -> None:
    """Answer requests until there are no more; a file that takes too long ends the process. The bounds are those of
    `megavlm.data.records.parquet_decoder`.
    """
    with open("/proc/self/statm") as file:
        has = int(file.read().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_AS, has + memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, decoded),  # of files in memory, too
    ):
        resource.setrlimit(limit, (value, value))
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXFSZ):
        signal.signal(each, signal.SIG_IGN)  # the first five are meant for the run, which goes on to its checkpoint
    pa.set_memory_pool(pa.system_memory_pool())  # the others keep what they reserve
    channel = socket.socket(fileno=descriptor)
    for request in channel.makefile("rb"):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends a process that does not expect it
        reply, files = answer(json.loads(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        line = json.dumps(reply).encode() + b"\n"
        channel.sendall(line[socket.send_fds(channel, [line], files) :])
        for sent in files:
            os.close(sent)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
