"""Write files. No other module opens one for writing (`tests/unit/test_files.py` has the exceptions, with reasons).

In a folder that this program keeps, somebody else may have put a link, a FIFO or a device where a file goes: a link is
replaced or refused but never followed, the others are refused. A file that the user names is written where it leads to,
and into what is there if that is no regular file, as /dev/null.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megavlm.errors import UserError
from megavlm.paths import inside, open_regular

_OPENED = re.compile(r"/dev/std(?:out|err)|(?:/dev/fd|/proc/self/fd)/(\d+)")  # what a shell has opened


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file of a folder of ours, whole or not at all: a reader sees the one before or the new one.

    A link is replaced. Characters that UTF-8 does not have become question marks. Raises OSError, also for what is
    there and is neither a file nor a link.
    """
    _refuse_special(path)
    temporary = path.with_name(f".{secrets.token_hex(6)}.tmp")
    try:
        with open_new(temporary) as file:
            file.write(_bytes(content))
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def open_new(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a new file of a folder of ours for writing, in place of a file or link of its name. Raises OSError."""
    _refuse_special(path)
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb", buffering=buffering)


def open_to_append(path: Path, *, buffering: int = 0) -> BinaryIO:
    """Open a file of a folder of ours, made where there is none, to write to its end; unless it is buffered, each write
    goes to the system at once, so that lines of several processes do not mix.

    Raises OSError for a link and for what is no regular file.
    """
    _refuse_special(path)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "a link, which is not followed", str(path))
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "ab", buffering=buffering)


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file to a new one in a folder of ours. Raises OSError."""
    with open_regular(source) as reading, open_new(target) as writing:
        shutil.copyfileobj(reading, writing)


def copy_files(source: Path, target: Path, *, suffixes: tuple[str, ...] | None = None) -> None:
    """Copy the regular files of a folder, those with one of `suffixes` if given, into a folder that is made.

    Raises Escapes for a link that leads out of `source`. What is no file is left out.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and (suffixes is None or path.suffix in suffixes):
            copy_file(inside(source, path.name), target / path.name)


def write_out(option: str, path: Path, content: str | bytes) -> None:
    """Write the file that an option names. Folders that it lies in are made.

    A link leads to the file, which is replaced whole; what is no regular file (a device, a FIFO with a reader,
    /dev/stdout) gets the content. Raises UserError, which names the option.
    """
    try:
        real = Path(os.path.realpath(path))
        opened = _OPENED.fullmatch(str(path))
        if opened or (real.exists() and not real.is_file() and not real.is_dir()):
            if opened:
                sys.stdout.flush()
                file = os.dup(int(opened[1] or (1 if opened[0] == "/dev/stdout" else 2)))
            else:
                file = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
                os.set_blocking(file, True)
            with os.fdopen(file, "wb") as written:
                written.write(_bytes(content))
            return
        real.parent.mkdir(parents=True, exist_ok=True)
        replace_file(real, content)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        nobody = isinstance(error, OSError) and error.errno == errno.ENXIO
        reason = "nobody reads it" if nobody else getattr(error, "strerror", None) or str(error)
        raise UserError(f"{option} {path} cannot be written: {reason}") from error


def check_folder(option: str, path: Path) -> None:
    """Raise UserError where a folder cannot be written: something else has its name, it is a URL, or nothing can be
    made there.
    """
    if os.path.lexists(path) and not path.is_dir():
        raise UserError(f"{option} {path} is no folder: name another")
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):  # a Path has one of its two slashes
        raise UserError(f"{option} {path} is a URL: name a folder of this machine, and copy it there")
    try:
        os.rmdir(tempfile.mkdtemp(dir=next(each for each in (path, *path.absolute().parents) if each.is_dir())))
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written ({error.strerror}): name another") from error


def unwritable(run_dir: Path, error: OSError) -> UserError:
    """Return the mistake of a --run-dir that cannot be written; it names the file that is in the way, if one is."""
    name = error.filename
    if isinstance(name, str) and Path(name) != run_dir and os.path.lexists(name):
        return UserError(
            f"--run-dir: {name} cannot be written ({error.strerror}): move it away, or name another folder"
        )
    return UserError(f"--run-dir {run_dir} cannot be written ({error.strerror}): choose another folder")


def _bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode("utf-8", "replace")


def _refuse_special(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, what, str(path))
