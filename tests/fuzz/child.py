"""Try inputs of a reader in a forked child that has little memory and time, and in which nothing may be started.

The child is where a reader may crash, hang or take all memory: the parent sees how it ended and on which input.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
    few: int = 15  # damaged inputs in the fast tests


def attempt(reader: Reader, inputs: Iterable[bytes], folder: Path) -> str:
    """Read inputs in a child; return how the first one that failed did, empty if none did.

    What comes after it is not tried; it is FOLDER/input.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answer = folder / "answer"
    process = os.fork()
    if process == 0:
        try:
            try:
                how = _try_all(reader, inputs, folder)
            except BaseException:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                how = traceback.format_exc()[-20_000:]
            answer.write_text(how)
        finally:
            os._exit(0)  # whatever happens: two processes would go on with the tests
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return answer.read_text() if answer.exists() else f"the process ended with status {status}"


def _try_all(reader: Reader, inputs: Iterable[bytes], folder: Path) -> str:
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
        place = folder / str(number)
        place.mkdir()
        (place / "link").symlink_to(folder / "secret")
        resource.setrlimit(resource.RLIMIT_AS, (has + reader.memory, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        assert_answered(lambda place=place, data=data: reader.read(place, data))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if escapes:
            return "\n".join(escapes)
        shutil.rmtree(place)
    return ""


def _watch(event: str, arguments: tuple[Any, ...], folder: Path, escapes: list[str]) -> None:
    """Note what no reader does: start other programs, connect, write outside of its folder, follow a link out of it."""
    if event == "open":
        path, mode, flags = arguments
        if not isinstance(path, str | bytes):
            return
        real = os.path.realpath(os.fsdecode(path))
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or (isinstance(mode, str) and set(mode) & set("wax+"))
        allowed = real.startswith((f"{folder}/", "/dev/", "/proc/"))
        if (writes and not allowed) or (real == str(folder / "secret") and mode != "fuzz"):
            escapes.append(f"opened {real} ({mode}, {flags:#x})")
    elif event == "subprocess.Popen":
        if not any(str(word).endswith(_HELPER) for word in arguments[1]):
            escapes.append(f"started {arguments[1]}")
    elif event in ("os.system", "os.exec", "os.posix_spawn", "pty.spawn", "socket.connect", "socket.bind"):
        escapes.append(f"{event} {arguments!r:.200}")
