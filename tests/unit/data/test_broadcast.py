"""A step as bytes: everything of it but pixels comes out as it went in, and nothing is run to read it."""

from __future__ import annotations

from dataclasses import replace

import torch

from megavlm.arch.anyres import TileGroup
from megavlm.data.broadcast import aligned, copy_to, deserialize, serialize, size_of
from megavlm.data.types import Imbalance, Skipped, StepData
from tests.support.micro_batch import micro_batch


def step() -> StepData:
    first = micro_batch(1, dtype=torch.bfloat16)
    odd = replace(
        micro_batch(2),
        cu_seqlens=torch.tensor([0, 5, 64], dtype=torch.int32),  # 12 bytes: what follows begins at 16
        feature_positions=torch.empty(0, dtype=torch.int64),
        positions=torch.arange(3 * 2 * 32).view(3, 2, 32),
        sources=torch.ones(2, 32, dtype=torch.int64),
        tile_groups=(TileGroup(grid=(1, 2), size=(30, 40)),),
        lengths=(31, 7),
        patches=None,
        grids=(),
        features=None,
    )
    return StepData(
        batches=[replace(first, features=None), odd],
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
        for name, value in vars(other).items():
            got = getattr(mine, name)
            if name == "patches":
                assert got is value is None or (got.is_meta and (got.shape, got.dtype) == (value.shape, value.dtype))
            elif isinstance(value, torch.Tensor):
                assert got.dtype == value.dtype
                assert got.equal(value), name
                assert got.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr(), "a view, not a copy"
            else:
                assert got == value, name
    assert b"pickle" not in description
    assert aligned(5) == aligned(8) == 8
