"""Files that data names: they lie in its folder, are regular files, and are no larger than expected."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class Escapes(ValueError):
    """A name that leads out of the folder that it belongs to."""


def inside(folder: Path, name: str) -> Path:
    """Return `folder`/`name` for a plain name of a regular file in it. Raises Escapes; OSError where it is not there.

    A name with a directory in it is refused, and so is a link that leads out of `folder`.
    """
    path = folder / plain(name)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise Escapes(f"{path} is a link that leads out of its folder")
    check_regular(path)
    return path


def plain(name: str) -> str:
    """Return a name that has no directory in it and is none. Raises Escapes for any other."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name or len(os.fsencode(name)) > 255:
        raise Escapes(f"{name!r:.80} is no plain file name")
    return name


def check_regular(path: Path) -> None:
    """Raise OSError for what is no regular file: to open a FIFO waits for ever, a device has no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is no regular file")


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for anything else; never waits for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb", buffering=buffering)


def read_bytes(path: Path, *, at_most: int) -> bytes:
    """Return the content of a regular file. Raises OSError for anything else, and for a file of more than `at_most`."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > at_most:
            raise OSError(f"{path} has {size} bytes, more than {at_most}")
        return file.read(size)
