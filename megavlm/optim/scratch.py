"""`Scratch`: fp32 numbers in a file that no other process sees, and that is gone when its process ends in any way.

The file has no name from the start (`O_TMPFILE`, or unlinked as soon as it is open), so nothing is left of a run that
was killed and nothing has to be cleared away. All of it is reserved when it is made: a disk without room says so before
the first step. Numbers are read and written with plain calls, whose failure is an error; `numbers` shows the same bytes
as a tensor that the system pages in and out, for whoever saves and loads them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from megavlm.errors import ScratchLost, UserError

_EACH = 4  # bytes of a number


class Scratch:
    """A file of `count` numbers, zero at first, in a folder that is made where it is missing.

    Raises UserError where there is no room or the folder cannot be written to.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._option = f"--offload optimizer=nvme:{folder}"
        size = count * _EACH
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            if size:
                os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            raise UserError(
                f"{self._option}: cannot reserve {size / 2**30:.2f} GiB for a rank's moments ({error.strerror}): free "
                "space, or name another folder"
            ) from error
        self.numbers = _mapped(self._file.fileno(), size)

    def read(self, start: int, into: Tensor) -> None:
        """Fill a contiguous tensor with the numbers from `start` on. Raises ScratchLost."""
        self._move(os.preadv, start, into)

    def write(self, start: int, numbers: Tensor) -> None:
        """Write a contiguous tensor's numbers from `start` on. Raises ScratchLost."""
        self._move(os.pwritev, start, numbers)

    def _move(self, call: object, start: int, numbers: Tensor) -> None:
        assert callable(call)
        rest, place = memoryview(numbers.view(-1).numpy().data).cast("B"), start * _EACH
        try:
            while rest:  # a call may move less than it was asked to
                moved = call(self._file.fileno(), [rest], place)
                if not moved:
                    raise OSError(0, "the file has become shorter")
                rest, place = rest[moved:], place + moved
        except OSError as error:
            raise ScratchLost(
                f"{self._option} failed in a step ({error.strerror}): the last checkpoint is whole; free space or name "
                "another folder, then resume"
            ) from error


def _mapped(descriptor: int, size: int) -> Tensor:
    """Return the bytes of a file as fp32 numbers; what is written to them is in the file, and the reverse."""
    if not size:
        return torch.empty(0)
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.float32)
