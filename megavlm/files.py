"""Write files. No other module opens one for writing (`tests/unit/test_files.py` has the exceptions, with reasons).

In a folder that this program keeps, another user may have put a link, a FIFO or a device in place of a file. A link is
replaced or refused but never followed; a FIFO or device is refused. For a file that the user names, links are followed,
and a path that is no regular file, such as /dev/null, is written to.
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
    """Replace a file in a folder of this program atomically: a reader sees the old file or the new one.

    A link is replaced. Characters that UTF-8 does not have become question marks. Raises OSError, also
    if the path is neither a file nor a link.
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
    """Create a file in a folder of this program and open it for writing; replace a file or link. Raises OSError."""
    _refuse_special(path)
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb", buffering=buffering)


def open_to_append(path: Path, *, buffering: int = 0) -> BinaryIO:
    """Open a file in a folder of this program to append, and create it if missing. Unless the file is buffered, each
    write goes to the system at once, so that lines of several processes do not mix.

    Raises OSError for a link and for anything but a regular file.
    """
    _refuse_special(path)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "a link, which is not followed", str(path))
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "ab", buffering=buffering)


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file to a new file in a folder of this program. Raises OSError."""
    with open_regular(source) as reading, open_new(target) as writing:
        shutil.copyfileobj(reading, writing)


def copy_files(source: Path, target: Path, *, suffixes: tuple[str, ...] | None = None) -> None:
    """Copy the regular files of a folder, only those with one of `suffixes` if given, to `target`, which is created.

    Raises Escapes for a link that leads out of `source`. Anything but a file is left out.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and (suffixes is None or path.suffix in suffixes):
            copy_file(inside(source, path.name), target / path.name)


def write_out(option: str, path: Path, content: str | bytes) -> None:
    """Write the file that an option names. Parent folders are created.

    A link is followed, and the file is replaced atomically. If the path is no regular file (a device, a FIFO with a
    reader, /dev/stdout), the content is written to it. Raises UserError, which names the option.
    """
    _refuse_home(option, path)
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
    """Raise UserError if a folder cannot be written: its path is no folder, it is a URL, or nothing can be created
    in it.
    """
    _refuse_home(option, path)
    if os.path.lexists(path) and not path.is_dir():
        raise UserError(f"{option} {path} is no folder: name another")
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):  # a Path has one of its two slashes
        raise UserError(f"{option} {path} is a URL: name a folder of this machine, and copy it there")
    try:
        os.rmdir(tempfile.mkdtemp(dir=next(each for each in (path, *path.absolute().parents) if each.is_dir())))
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written ({error.strerror}): name another") from error


def _refuse_home(option: str, path: Path) -> None:
    """Raise UserError for ~ behind `=`, where a shell leaves it: a folder of that name would be made."""
    if path.parts[:1] == ("~",):
        raise UserError(f"{option} {path} starts with ~, which only a shell expands: write the full path")


def unwritable(run_dir: Path, error: OSError) -> UserError:
    """Return the error for a --run-dir that cannot be written; it names the file that is in the way, if any."""
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
