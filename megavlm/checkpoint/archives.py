"""Find what `torch.save` wrote in bytes that are in memory, without running anything that they may contain."""

from __future__ import annotations

import io
import os
from typing import IO, Any, cast

import torch
from torch import Tensor

from megavlm.checkpoint.records import check_record
from megavlm.errors import UserError


class Archive(io.RawIOBase):
    """The bytes of a tensor, as a file."""

    def __init__(self, content: Tensor) -> None:
        """Read from `content`, bytes in host memory, which are not copied."""
        self._content = content.numpy().data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}[whence]
        if base + offset < 0:
            raise ValueError("a seek to before the first byte")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        piece = self._content[self._at : self._at + len(buffer)]
        memoryview(buffer).cast("B")[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def tensor_in(content: Tensor, name: str) -> Tensor:
    """Return the tensor that `torch.save` wrote, as a view of `content`, its bytes. Raises UserError for anything else.

    torch reads the description alone; its own reading of values would copy them once more.
    """
    archive = cast("IO[bytes]", Archive(content))
    check_record(archive, name)
    try:
        described = torch.load(archive, map_location="meta", weights_only=True)
        storage = described.untyped_storage()
        begin, size = storage._checkpoint_offset, storage.nbytes()
        if begin + size > content.numel():
            raise ValueError("it ends too early")
        values = content[begin : begin + size].view(described.dtype)
        first = values.storage_offset() + described.storage_offset()
        return values.as_strided(described.shape, described.stride(), first)
    except Exception as error:  # damaged bytes may raise any error
        raise _refusal(name) from error


def plain_values(file: IO[bytes], name: str) -> Any:
    """Return what `torch.save` wrote: tensors and plain values. Raises UserError for anything else."""
    check_record(file, name)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own advice is to switch the check off
        raise _refusal(name) from error


def _refusal(name: str) -> UserError:
    return UserError(
        f"{name} holds something else than tensors and plain values, or is damaged: it is not loaded; use a "
        "checkpoint whose origin you know"
    )
