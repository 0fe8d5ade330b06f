"""Bytes of tensors at places in files, read and written without a file position: threads can share a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

# What is read, and written, at once: small enough that the allocator reuses its memory instead of mapping it anew.
PIECE_BYTES = 16 * 2**20
# Readers that write what they have read: the disk is busy while one of them copies.
THREADS = 3

Task = TypeVar("Task")


def read_into(descriptor: int, tensor: Tensor, offset: int) -> None:
    """Fill a contiguous tensor with a file's bytes from `offset` on. Raises EOFError where the file ends before."""
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
    """Run `task` for all items on a few threads; the first error is raised, and what was not begun is left out."""
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
