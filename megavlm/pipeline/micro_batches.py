"""A step's micro-batches on their way from the host to the device, one ahead of use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megavlm.backend.host_copies import HostCopies
from megavlm.data.batch import MicroBatch


class DevicePrefetcher:
    """Hands out micro-batches on the device, the same to each of a rank's chunks, in order.

    While one is used the next one is copied. One is freed when all chunks have taken it, but for the tensors that
    autograd keeps for a backward pass.
    """

    def __init__(
        self,
        batches: Sequence[MicroBatch],
        host_copies: HostCopies,
        *,
        chunks: int,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """`batches` are on the host, but for what never travels (`MicroBatch.travelling`). `meanwhile` is called
        whenever a chunk takes one.
        """
        self._batches = batches
        self._host_copies = host_copies
        self._meanwhile = meanwhile
        self._awaited_by = [chunks] * len(batches)
        self._on_the_way: dict[int, tuple[MicroBatch, Any]] = {}
        self._here: dict[int, MicroBatch] = {}

    def for_a_chunk(self) -> Iterator[MicroBatch]:
        """All micro-batches, for one chunk."""
        for index in range(len(self._batches)):
            yield self._take(index)

    def _take(self, index: int) -> MicroBatch:
        if self._meanwhile is not None:
            self._meanwhile()
        if index not in self._here:
            self._send(index)
            batch, ticket = self._on_the_way.pop(index)
            self._host_copies.wait(ticket)
            self._here[index] = _seen(batch)
            self._send(index + 1)
        self._awaited_by[index] -= 1
        return self._here[index] if self._awaited_by[index] else self._here.pop(index)

    def _send(self, index: int) -> None:
        """Begin to copy a micro-batch, if there is one that has not begun."""
        if index >= len(self._batches) or index in self._on_the_way:
            return
        batch = self._batches[index]
        names, values = zip(*batch.travelling().items(), strict=True)
        copies, ticket = self._host_copies.to_device(values)
        copied: dict[str, Any] = dict(zip(names, copies, strict=True))
        self._on_the_way[index] = replace(batch, **copied), ticket


def _seen(batch: MicroBatch) -> MicroBatch:
    """A micro-batch on the device with its patches, which its first seer sends to the others. All call it alike."""
    patches, vision_group = batch.patches, batch.vision_group
    if patches is None or vision_group is None:
        return batch
    if patches.is_meta:
        patches = torch.empty(patches.shape, dtype=patches.dtype, device=batch.tokens.device)
    if patches.numel():
        dist.broadcast(patches, group=vision_group, group_src=0)
    return replace(batch, patches=patches, vision_group=None)
