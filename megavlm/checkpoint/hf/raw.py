"""Read and write the bytes of tensors at given offsets of files, without a file position, so threads can share one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

# Tensors are read and written in pieces of this size: small enough that the allocator reuses their memory.
PIECE_BYTES = 16 * 2**20
# Each thread reads a piece and writes it. With several, the disk is busy while one of them copies in memory.
THREADS = 3

Task = TypeVar("Task")


def read_into(descriptor: int, tensor: Tensor, offset: int) -> None:
    """Fill a contiguous tensor with a file's bytes from `offset` on. Raises EOFError if the file ends too early."""
    view = _bytes(tensor)
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise EOFError(f"the file ends {len(view)} bytes before the tensor does")
        view, offset = view[count:], offset + count


def write_at(descriptor: int, tensor: Tensor, offset: int) -> None:
    """Write a tensor's values, row-major, from `offset` on."""
    view = _bytes(tensor.contiguous())
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def for_each(task: Callable[[Task], None], items: Iterable[Task]) -> None:
    """Run `task` for all items on THREADS threads. Raises the first error; items that were not begun are left out."""
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(task, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
