"""What data workers make lies in memory that the training process has mapped once, and that is used again."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.backend import host_copies
from megavlm.backend.host_copies import SharedMemories, SharedMemory
from megavlm.data.types import CollatedBatch
from megavlm.data.workers import _room, loaded, stored
from megavlm.errors import UserError
from megavlm.inputs.batch import ImageBatch, MicroBatch
from tests.support.micro_batch import micro_batch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


def made(patches: int) -> MicroBatch:
    """Return a micro-batch with so many patches, in bf16, and a tensor of 12 bytes."""
    batch = micro_batch(1, dtype=torch.bfloat16)
    text = replace(batch.text, cu_seqlens=torch.tensor([0, 5, 64], dtype=torch.int32))
    pixels = torch.arange(patches * 100, dtype=torch.float32).view(patches, 100).bfloat16()
    return replace(batch, text=text, images=ImageBatch(batch.image_sizes, pixels), features=None)


def passed(memories: SharedMemories, memory: SharedMemory, batch: MicroBatch) -> MicroBatch:
    """Return what the training process gets of a worker's micro-batch."""
    worker = SharedMemory(os.dup(memory.file))
    sent = stored(CollatedBatch(batch), worker)
    worker.close()
    assert len(sent.description) < 2000, "tensors do not pass through the pipe"
    return loaded(sent, memories, memory).batch


def tensors(batch: MicroBatch) -> dict[str, Tensor]:
    assert batch.images is not None
    return {**batch.text.tensors(), "patches": batch.images.patches}


def check(found: MicroBatch, batch: MicroBatch) -> None:
    batch = batch.with_tensors(batch.host_tensors())  # equal rows of positions are one
    assert tensors(found).keys() == tensors(batch).keys()
    assert (found.image_sizes, found.text.lengths) == (batch.image_sizes, batch.text.lengths)
    for name, expected in tensors(batch).items():
        got = tensors(found)[name]
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected), name
        assert got.is_contiguous()
        assert not got.numel() or got.data_ptr() % 64 == 0, "as torch aligns its own"


def test_memory_is_used_again_once_no_tensor_lies_in_it() -> None:
    memories = SharedMemories(CPU)
    first = memories.take()
    for patches in (3, 300, 2):  # it grows, and what it was before can be overwritten
        found = passed(memories, first, made(patches))
        assert memories.take() is not first, "it is still needed"
        check(found, made(patches))
        row = tensors(found)["patches"][1:]
        del found
        assert memories.take() is not first, "a part of it is"
        assert torch.equal(row, tensors(made(patches))["patches"][1:])
        del row
        assert memories.take() is first
    found = passed(memories, first, made(2))
    memories.close()
    check(found, made(2))
    del found
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first.file)


def test_memory_is_pinned_once_and_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stand-ins of `torch.cuda`."""
    pinned: dict[int, int] = {}
    events: list[Any] = []
    here: list[torch.device] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            assert here == [GPU], "a context would be created on the first device"
            pinned[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            del pinned[address]

    class Here:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            here.append(self.device)

        def __exit__(self, *_: object) -> None:
            here.pop()

    class Event:
        done = False

        def record(self, stream: str) -> None:
            assert stream == "stream of cuda:3"
            events.append(self)

        def query(self) -> bool:
            return self.done

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", Here)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    memories = SharedMemories(GPU)
    memory = memories.take()
    for patches in (300, 200, 400):
        found = passed(memories, memory, made(patches))
        address = found.text.tokens.data_ptr()
        assert pinned == {address: memory.bytes}
        del found
        assert memories.take() is not memory, "a copy to the device may still read it"
        events[-1].done = True
        assert memories.take() is memory
    memories.give_back(memory)
    memories.close()
    assert not pinned


@pytest.mark.parametrize("refused", ["memfd_create", "ftruncate", "mmap"])
def test_a_lack_of_memory_names_the_option(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    memories = SharedMemories(CPU)
    memory = memories.take()
    sent = stored(CollatedBatch(made(1)), SharedMemory())

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(host_copies.mmap if refused == "mmap" else host_copies.os, refused, refuse)

    def everything() -> None:
        with _room():
            memories.take()
        stored(CollatedBatch(made(3)), memory)
        loaded(sent, memories, memory)

    told = r"^--num-workers: no memory can be shared with data workers \(Cannot allocate memory\): .*--num-workers 0"
    with pytest.raises(UserError, match=told):
        everything()
