"""A step as bytes: everything of it but pixels comes out as it went in, and nothing is run to read it."""

from __future__ import annotations

from dataclasses import replace

import torch

from megavlm.arch.image_tokens import TileGroup
from megavlm.data.broadcast import aligned, copy_to, deserialize, serialize, size_of
from megavlm.data.types import Imbalance, StepData
from megavlm.inputs.bad_sample import Skipped
from megavlm.inputs.batch import ImageSizes, MicroBatch
from tests.support.micro_batch import micro_batch


def step() -> StepData:
    first, second = micro_batch(1, dtype=torch.bfloat16), micro_batch(2)
    odd = replace(
        second.text,
        cu_seqlens=torch.tensor([0, 5, 64], dtype=torch.int32),  # 12 bytes: what follows begins at 64
        feature_positions=torch.empty(0, dtype=torch.int64),
        positions=torch.arange(3 * 2 * 32).view(3, 2, 32),
        sources=torch.ones(2, 32, dtype=torch.int64),
        lengths=(31, 7),
    )
    groups = (TileGroup(grid=(1, 2), size=(30, 40)), TileGroup((0, 0), (30, 40), "last frame"))
    tiled = ImageSizes(((2, 2),) * 4, groups)
    return StepData(
        batches=[replace(first, features=None), MicroBatch(odd, tiled)],
        read=9,
        skipped=(Skipped("train.jsonl:18", "träin", "truncated", "Bild – kaputt", partly=True),),
        imbalance=Imbalance(1.5, 1.25, 2.0, 1.75),
    )


def test_a_step_comes_out_as_it_went_in() -> None:
    sent = step()
    description, tensors = serialize(sent)
    memory = torch.full((size_of(tensors),), 255, dtype=torch.uint8)
    copy_to(memory, tensors)
    found = deserialize(description, memory)
    assert (found.read, found.skipped, found.imbalance) == (sent.read, sent.skipped, sent.imbalance)
    for mine, other in zip(found.batches, sent.batches, strict=True):
        assert mine.image_sizes == other.image_sizes
        assert (mine.images is None) == (other.images is None)
        if mine.images is not None and other.images is not None:
            patches, expected = mine.images.patches, other.images.patches
            assert mine.images.sizes == other.images.sizes
            assert patches.is_meta
            assert (patches.shape, patches.dtype) == (expected.shape, expected.dtype)
        for name, value in vars(other.text).items():
            got = getattr(mine.text, name)
            if isinstance(value, torch.Tensor):
                assert got.dtype == value.dtype
                assert got.equal(value), name
                assert got.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr(), "a view, not a copy"
            else:
                assert got == value, name
    assert b"pickle" not in description
    assert aligned(5) == aligned(64) == 64
