"""Try inputs of a reader in a forked child that has little memory and time, and in which nothing may be started.

The child is where a reader may crash, hang or take all memory: the parent sees how it ended and on which input.
"""

from __future__ import annotations

import os
import pickle
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.hostile import assert_answered

SECONDS = 20.0  # of processor time for an input, on a slow machine
PATIENCE = 900.0  # seconds by the clock for an input: a reader that waits for ever takes no processor time
SECRET = "what lies outside of the folder"
_HELPER = "template_process.py"  # the program that readers may start


@dataclass(frozen=True)
class Reader:
    """How a file is read: `read(folder, content)` writes it to the folder and reads it as the program does."""

    read: Callable[[Path, bytes], Any]
    seeds: Callable[[], list[bytes]]
    memory: int = 2**29  # bytes of address space that a read may take, beyond what the process has
    few: int = 25  # damaged inputs in the fast tests


@dataclass
class Outcome:
    """What became of some inputs: how the first one that failed did, and which were answered in words of their own."""

    how: str = ""
    new: list[bytes] = field(default_factory=list)
    words: set[str] = field(default_factory=set)


def attempts(reader: Reader, inputs: Iterable[bytes], folder: Path, words: set[str] | None = None) -> Outcome:
    """Return the outcome of reading inputs in a child; what comes after one that fails is not tried.

    `words` are the answers that are known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    receive, send = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(receive)
        try:
            outcome = Outcome(words=set(words or ()))
            try:
                outcome.how = _try_all(reader, inputs, folder, outcome)
            except BaseException:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                outcome.how = traceback.format_exc()[-20_000:]
            with os.fdopen(send, "wb") as pipe:
                pickle.dump(outcome, pipe)
        finally:
            os._exit(0)  # whatever happens: two processes would go on with the tests
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    found: Outcome = pickle.loads(answer) if answer else Outcome(f"the process ended with status {status}")
    return found


def failing_input(folder: Path) -> bytes:
    """Return the input that was tried last in a folder."""
    return (folder / "input").read_bytes()


def _try_all(reader: Reader, inputs: Iterable[bytes], folder: Path, outcome: Outcome) -> str:
    """Return how the first failing input failed; empty if none did."""
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    for limit in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(limit, signal.SIG_DFL)
    sys.dont_write_bytecode = True
    tempfile.tempdir = str(folder)
    (folder / "secret").write_text(SECRET)
    escapes: list[str] = []
    sys.addaudithook(lambda event, arguments: _watch(event, arguments, folder.resolve(), escapes))
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, data in enumerate(inputs):
        (folder / "input").write_bytes(data)
        attempt = folder / str(number)
        attempt.mkdir()
        (attempt / "link").symlink_to(folder / "secret")
        resource.setrlimit(resource.RLIMIT_AS, (has + reader.memory, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        answer = assert_answered(lambda attempt=attempt, data=data: reader.read(attempt, data))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if escapes:
            return "\n".join(escapes)
        _remove(attempt)
        said = re.sub(r"'[^']*'|[0-9]+|/\S*", "", str(answer))[:80]
        if said not in outcome.words:
            outcome.words.add(said)
            outcome.new.append(data)
    return ""


def _watch(event: str, arguments: tuple[Any, ...], folder: Path, escapes: list[str]) -> None:
    """Note what no reader does: start other programs, connect, write outside of its folder, follow a link out of it."""
    if event == "open":
        path, mode, flags = arguments
        if not isinstance(path, str | bytes):
            return
        real = os.path.realpath(os.fsdecode(path))
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or (isinstance(mode, str) and set(mode) & set("wax+"))
        allowed = real.startswith(
            (
                f"{folder}/",
                "/dev/",
                "/proc/",
            )
        )
        if (writes and not allowed) or (real == str(folder / "secret") and mode != "fuzz"):
            escapes.append(f"opened {real} ({mode}, {flags:#x})")
    elif event == "subprocess.Popen":
        if not any(str(word).endswith(_HELPER) for word in arguments[1]):
            escapes.append(f"started {arguments[1]}")
    elif event in ("os.system", "os.exec", "os.posix_spawn", "pty.spawn", "socket.connect", "socket.bind"):
        escapes.append(f"{event} {arguments!r:.200}")


def _remove(folder: Path) -> None:
    for path, folders, files in os.walk(folder, topdown=False):
        for name in files:
            os.unlink(os.path.join(path, name))
        for name in folders:
            inner = os.path.join(path, name)
            if os.path.islink(inner):
                os.unlink(inner)
            else:
                os.rmdir(inner)
    os.rmdir(folder)
