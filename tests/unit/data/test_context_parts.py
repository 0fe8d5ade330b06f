"""The parts of all context-parallel ranks are the whole micro-batch: each position, feature and loss in one of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.data.batch import ImageSizes, LocalFeatures, MicroBatch, TextBatch
from megavlm.data.context_parts import part_of

IMAGE = 7


@st.composite
def batches(draw: st.DrawFn) -> tuple[MicroBatch, int]:
    """Rows with image tokens and trained tokens anywhere, or nowhere; and among how many ranks they are split."""
    ranks, rows, own = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size, shape = rows * ranks * own, (rows, ranks * own)
    flags = st.lists(st.booleans(), min_size=size, max_size=size)
    image, trained = (torch.tensor(draw(flags)).view(shape) for _ in range(2))
    numbers = torch.arange(size).view(shape)
    axes = draw(st.sampled_from(((), (3,))))
    text = TextBatch(
        tokens=torch.where(image, IMAGE, 100 + numbers),
        labels=200 + numbers,
        loss_mask=trained.float(),
        positions=(300 + numbers).expand(*axes, *shape),
        feature_positions=image.flatten().nonzero()[:, 0],
        trained_positions=trained.flatten().nonzero()[:, 0] if trained.any() else torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, size]),
        sources=400 + numbers,
    )
    return MicroBatch(text, ImageSizes()), ranks


@settings(max_examples=200, deadline=None)
@given(batches())
def test_the_parts_of_all_ranks_are_the_whole(drawn: tuple[MicroBatch, int]) -> None:
    batch, ranks = drawn
    parts = [part_of(batch, rank=rank, ranks=ranks) for rank in range(ranks)]
    for name in ("tokens", "labels", "loss_mask", "positions", "sources"):
        assert torch.equal(torch.cat([getattr(part.text, name) for part in parts], -1), getattr(batch.text, name))
    for part in parts:
        assert part.num_features == batch.num_features
        assert part.row_tokens is batch.text.tokens
        assert part.text.cu_seqlens is batch.text.cu_seqlens
    # The feature of each image token is found again by its label, which is its place in the whole.
    found = [
        (row, label)
        for part in parts
        for row, label in zip(
            range(batch.num_features) if part.context is None else part.context.feature_rows.tolist(),
            (part.text.labels.flatten()[part.text.feature_positions] - 200).tolist(),
            strict=True,
        )
    ]
    assert sorted(found) == list(enumerate(batch.text.feature_positions.tolist()))


@settings(max_examples=200, deadline=None)
@given(batches())
def test_every_trained_token_has_its_loss_in_one_part(drawn: tuple[MicroBatch, int]) -> None:
    batch, ranks = drawn
    losses: list[int] = []
    for rank in range(ranks):
        text = part_of(batch, rank=rank, ranks=ranks).text
        places = text.trained_positions
        assert places is not None
        assert len(places), "an output layer computes at least one loss"
        kept = places[text.loss_mask.flatten()[places] > 0]
        losses += (text.labels.flatten()[kept] - 200).tolist()
    assert sorted(losses) == batch.text.loss_mask.flatten().nonzero()[:, 0].tolist()


def test_features_of_a_colocated_encoder_move_with_their_tokens() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    none = torch.empty(0, dtype=torch.int64)
    text = TextBatch(tokens, tokens, tokens.float(), tokens, feature_positions=torch.tensor([1, 5, 6, 14]))
    batch = MicroBatch(text, ImageSizes(), features=LocalFeatures(torch.tensor([5, 6, 14]), None))
    second = part_of(batch, rank=1, ranks=2)
    assert second.features is not None
    assert second.features.positions.tolist() == [1, 2, 6] == second.text.feature_positions.tolist()
    first = part_of(replace(batch, features=LocalFeatures(none, None)), rank=0, ranks=2)
    assert first.text.feature_positions.tolist() == [1]


def test_the_device_gets_the_part_and_the_tokens_of_whole_rows() -> None:
    tokens = torch.arange(8).view(1, 8)
    text = TextBatch(tokens, tokens, tokens.float(), tokens, feature_positions=torch.tensor([2, 7]))
    batch = part_of(MicroBatch(text, ImageSizes()), rank=1, ranks=2)
    moved = batch.with_tensors({name: tensor + 1 for name, tensor in batch.host_tensors().items()})
    assert moved.text.tokens.tolist() == [[5, 6, 7, 8]]
    assert moved.row_tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert moved.context is not None
    assert moved.context.feature_rows.tolist() == [2]
