"""Write a safetensors file tensor by tensor; the library's own writer wants all of a file in memory at once.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the header's length, little-endian; the header, JSON
of name → type, shape and byte range, padded with spaces to a multiple of 8; then the bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megavlm.checkpoint.hf.raw import write_at
from megavlm.files import open_new

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class StreamedFile:
    """A file whose tensors are declared first; their rows may then be written in any order and from any thread."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Write the header of a file; `tensors` has (type in safetensors' spelling, shape) of each tensor by name."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        self._tensors = tensors
        self._starts: dict[str, int] = {}
        for name, (dtype, shape) in tensors.items():
            size = math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
            self._starts[name] = offset
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._first = 8 + len(text)
        self.size = offset
        self._file = open_new(path, buffering=0)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._first + offset)

    def write(self, name: str, values: Tensor, *, first_row: int = 0) -> None:
        """Write rows of a tensor, which must have the declared type, from row `first_row` on."""
        dtype, shape = self._tensors[name]
        assert values.dtype == DTYPES[dtype], f"{name} was declared as {dtype}"
        row = math.prod(shape[1:]) * values.element_size()
        write_at(self._file.fileno(), values, self._first + self._starts[name] + first_row * row)

    def __enter__(self) -> StreamedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
