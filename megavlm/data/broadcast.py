"""Broadcast the data of a step from the reading rank of a model replica to the other ranks.

A step is serialised as a description in JSON followed by the memory of its tensors: nothing is pickled, and the
receiver's tensors are views of the received bytes. Pixels and mel features are sent separately, to the ranks that need
them; the message contains only their shape and type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.arch.image_tokens import TileGroup
from megavlm.data.costs import ImageAssignment
from megavlm.data.types import Imbalance, LoaderState, StepData
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import Skipped
from megavlm.inputs.batch import ImageBatch, ImageSizes, Mask, MicroBatch, SoundBatch, TextBatch

_ALIGNMENT = 64  # bytes, as torch aligns tensors, so that matrix products are bitwise the same


@dataclass(frozen=True)
class ReplicaBroadcast:
    """Broadcasts steps within a model replica.

    The first rank of `replica` reads. `vision_group` are the ranks that encode images, the reader first; None on a rank
    that encodes none. Each of them encodes all images, or with `assignment` its assigned images. `hosts` is the replica
    as a group that exchanges host memory, so that messages do not wait for the device. `audio_ranks` are the ranks in
    it that encode sounds, all of each micro-batch; with `assignment` each encodes its assigned ones.
    """

    replica: dist.ProcessGroup
    hosts: dist.ProcessGroup
    vision_group: dist.ProcessGroup | None
    device: torch.device
    assignment: ImageAssignment | None = None
    audio_ranks: Sequence[int] = ()

    @property
    def reads(self) -> bool:
        return self.replica.rank() == 0

    def share(self, read: Callable[[], StepData | None]) -> StepData | None:
        """Return, on every rank and in host memory, the step that `read` returns on the replica's first rank.

        Returns None if `read` returns None. With `assignment` each rank has the patches of its own images, on the
        device; else `vision_group` receives patches when a micro-batch is copied to the device. Ranks that encode
        sounds have the mel features. A UserError of the reader is raised on every rank, so that no rank waits for data
        in vain.
        """
        if self.replica.size() == 1:
            return read()
        step: StepData | None = None
        message = ""
        if self.reads:
            try:
                step = read()
            except UserError as error:
                message = str(error)
        received = self._broadcast(step, message)
        if isinstance(received, UserError):
            raise received
        found = received if step is None else step
        return None if found is None else self._with_pixels(self._with_sounds(found))

    def share_state(self, state: LoaderState | None) -> LoaderState:
        """Broadcast the reader's state to every rank and return it. The state is pickled; used for checkpoints only."""
        shared = [state]
        if self.replica.size() > 1:
            dist.broadcast_object_list(shared, group=self.hosts, group_src=0)
        assert shared[0] is not None
        return shared[0]

    def _broadcast(self, step: StepData | None, error: str) -> StepData | UserError | None:
        """Broadcast the reader's step or error as a header of fixed size and a message, and return it on every rank.

        The host waits for both. Returns None if there is neither a step nor an error.
        """
        description, tensors = serialize(step) if step is not None else (error.encode(), [])
        header = torch.tensor([step is not None, len(description), size_of(tensors)])
        dist.broadcast(header, group=self.hosts, group_src=0)
        is_step, text_bytes, tensor_bytes = header.tolist()
        if not text_bytes:
            return None
        start = aligned(text_bytes)
        message = torch.empty(start + tensor_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        if self.reads:
            message[:text_bytes] = torch.frombuffer(bytearray(description), dtype=torch.uint8)
            copy_to(message[start:], tensors)
        dist.broadcast(message, group=self.hosts, group_src=0)
        text = message[:text_bytes].numpy().tobytes()
        return deserialize(text, message[start:]) if is_step else UserError(text.decode())

    def _with_sounds(self, step: StepData) -> StepData:
        """Send the mel features of each sound from the reader to the ranks that encode it, in host memory.

        Other ranks have none, or of other sounds of the micro-batch an empty place.
        """
        pairs = zip(step.batches, self._sound_ranks(step.batches), strict=True)
        return replace(step, batches=[self._with_mels(*pair) for pair in pairs])

    def _sound_ranks(self, batches: Sequence[MicroBatch]) -> list[list[Sequence[int]]]:
        """Return, for each micro-batch and each of its sounds, the ranks that encode it."""
        frames = [batch.sound_frames for batch in batches]
        if self.assignment is None:
            return [[self.audio_ranks] * len(each) for each in frames]
        width = self.assignment.width
        encoders = self.assignment.encoders([batch.image_sizes for batch in batches], frames)[len(batches) :]
        return [[range(one * width, (one + 1) * width) for one in each.tolist()] for each in encoders]

    def _with_mels(self, batch: MicroBatch, receivers: Sequence[Sequence[int]]) -> MicroBatch:
        sounds, rank = batch.sounds, self.replica.rank()
        if sounds is None or not (self.reads or any(rank in each for each in receivers)):
            return batch
        mels = sounds.mels if self.reads else torch.empty(sounds.mels.shape, pin_memory=self.device.type == "cuda")
        sending: list[Any] = []
        for sound, ranks in zip(mels.split(sounds.frames), receivers, strict=True):
            if self.reads:
                sending += [dist.isend(sound, group=self.hosts, group_dst=other) for other in ranks if other]
            elif rank in ranks:
                dist.recv(sound, group=self.hosts, group_src=0)
        for sent in filter(None, sending):
            sent.wait()
        return replace(batch, sounds=replace(sounds, mels=mels))

    def _with_pixels(self, step: StepData) -> StepData:
        if self.vision_group is None:
            return _with_images(step, [None] * len(step.batches))
        images = [batch.images for batch in step.batches if batch.images is not None]
        if self.assignment is not None:
            chosen = self.assignment.by_rank([each.sizes for each in images])
            return _with_images(step, [self._scatter(*each) for each in zip(images, chosen, strict=True)])
        if self.vision_group.size() == 1:
            return step
        return _with_images(step, [replace(each, vision_group=self.vision_group) for each in images])

    def _scatter(self, images: ImageBatch, chosen: Sequence[Mask]) -> ImageBatch:
        """Scatter the images of a micro-batch from the reader by the ranks' masks [N]; return this rank's images."""
        rows = [images.sizes.patch_rows(mask) for mask in chosen]
        rank = self.replica.rank()
        width = images.patches.shape[1]  # values of a patch, which spans one frame or several of a video
        outgoing = torch.empty(0, width, dtype=images.patches.dtype, device=self.device)
        sent = [0] * len(rows)
        if self.reads:
            order = torch.from_numpy(np.concatenate(rows)).to(self.device, non_blocking=True)
            outgoing = images.patches.to(self.device, non_blocking=True).index_select(0, order)
            sent = [len(each) for each in rows]
        received = [len(rows[rank]), *[0] * (len(rows) - 1)]
        patches = outgoing.new_empty(len(rows[rank]), width)
        dist.all_to_all_single(patches, outgoing, received, sent, group=self.replica)
        return ImageBatch(images.sizes.select(chosen[rank]), patches)


def _with_images(step: StepData, images: Sequence[ImageBatch | None]) -> StepData:
    pairs = zip(step.batches, images, strict=True)
    return replace(step, batches=[replace(batch, images=each) for batch, each in pairs])


def serialize(step: StepData, *, pixels: bool = False) -> tuple[bytes, list[Tensor]]:
    """Return the description of a step as JSON, and its tensors, with patches and mel features only if `pixels`.

    `deserialize` is the inverse.
    """
    tensors: list[Tensor] = []
    for batch in step.batches:
        tensors += batch.text.tensors().values()
        if batch.sounds is not None:
            tensors += [batch.sounds.positions, batch.sounds.rows, *[batch.sounds.mels] * pixels]
        if pixels and batch.images is not None:
            tensors.append(batch.images.patches)
    description = {
        "batches": [_described(batch) for batch in step.batches],
        "pixels": pixels,
        "read": step.read,
        "last": step.last,
        "skipped": [asdict(each) for each in step.skipped],
        "imbalance": None if step.imbalance is None else asdict(step.imbalance),
    }
    return json.dumps(description).encode(), tensors


def size_of(tensors: list[Tensor]) -> int:
    """Return the total size of tensors in bytes, each padded to the alignment."""
    return sum(aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)


def copy_to(memory: Tensor, tensors: list[Tensor]) -> None:
    """Copy tensors to uint8 memory [bytes], one after the other, each padded to the alignment."""
    start = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size:  # an empty tensor may have strides that no view as bytes accepts
            memory[start : start + size].copy_(tensor.contiguous().flatten().view(torch.uint8))
        start += aligned(size)


def deserialize(description: bytes, memory: Tensor) -> StepData:
    """Return the step with its tensors as views of uint8 memory [bytes].

    Patches and mel features that were not serialised become "meta" tensors, which have only a shape and type.
    """
    fields = json.loads(description)
    reader = _Reader(memory)
    imbalance = fields["imbalance"]
    return StepData(
        batches=[_batch(batch, reader, pixels=fields["pixels"]) for batch in fields["batches"]],
        read=fields["read"],
        last=fields["last"],
        skipped=tuple(Skipped(**each) for each in fields["skipped"]),
        imbalance=None if imbalance is None else Imbalance(**imbalance),
    )


def _described(batch: MicroBatch) -> dict[str, Any]:
    patches, sizes = None if batch.images is None else batch.images.patches, batch.image_sizes
    sounds = None
    if batch.sounds is not None:
        sounds = {
            "frames": batch.sounds.frames,
            "tokens": len(batch.sounds.rows),
            "mels": list(batch.sounds.mels.shape),
        }
    return {
        "tensors": [(name, _dtype(each), list(each.shape)) for name, each in batch.text.tensors().items()],
        "sounds": sounds,
        "patches": None if patches is None else (_dtype(patches), list(patches.shape)),
        "grids": sizes.grids,
        "tile_groups": [(group.grid, group.size, group.kind) for group in sizes.tile_groups],
        "lengths": batch.text.lengths,
        "row_counts": batch.text.row_counts,
        "prefixes": batch.text.prefixes,
    }


def _batch(fields: dict[str, Any], reader: _Reader, *, pixels: bool) -> MicroBatch:
    tensors: dict[str, Any] = {
        name: reader.next(getattr(torch, dtype), shape) for name, dtype, shape in fields["tensors"]
    }
    sounds = None
    if fields["sounds"] is not None:
        frames, tokens, shape = (fields["sounds"][name] for name in ("frames", "tokens", "mels"))
        positions, rows = (reader.next(torch.int64, [tokens]) for _ in range(2))
        mels = reader.next(torch.float32, shape) if pixels else torch.empty(shape, device="meta")
        sounds = SoundBatch(tuple(frames), mels, positions, rows)
    sizes = ImageSizes(
        grids=tuple(map(tuple, fields["grids"])),
        tile_groups=tuple(TileGroup(tuple(grid), tuple(size), kind) for grid, size, kind in fields["tile_groups"]),
    )
    images = None
    if fields["patches"] is not None:
        shape, dtype = fields["patches"][1], getattr(torch, fields["patches"][0])
        patches = reader.next(dtype, shape) if pixels else torch.empty(shape, dtype=dtype, device="meta")
        images = ImageBatch(sizes, patches)
    counts = tuple((tokens, trained) for tokens, trained in fields["row_counts"])
    prefixes = tuple((first, count) for first, count in fields["prefixes"])
    text = TextBatch(**tensors, lengths=tuple(fields["lengths"]), prefixes=prefixes, row_counts=counts)
    return MicroBatch(text, sizes, images, sounds=sounds)


class _Reader:
    """Reads consecutive tensors from uint8 memory [bytes]."""

    def __init__(self, memory: Tensor) -> None:
        self._rest = memory

    def next(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        found, self._rest = self._rest[:size], self._rest[aligned(size) :]
        return found.view(dtype).view(shape)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def aligned(size: int) -> int:
    """Return `size` rounded up to the alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
