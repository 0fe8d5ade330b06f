"""The parts of all context-parallel ranks are the whole micro-batch: each position, feature and loss in one of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.arch.dims import RowSplit
from megavlm.data.context_parts import followers, order_of, part_of, with_further_tokens
from megavlm.inputs.batch import ImageSizes, LocalFeatures, MicroBatch, TextBatch

IMAGE = 7


@st.composite
def batches(draw: st.DrawFn) -> tuple[MicroBatch, RowSplit]:
    """Draw rows with image and trained tokens at random places, and how context-parallel ranks split them."""
    split, rows = RowSplit(draw(st.integers(1, 4)), draw(st.integers(1, 4))), draw(st.integers(1, 3))
    length = split.multiple * draw(st.integers(1, 3))
    size, shape = rows * length, (rows, length)
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
    return MicroBatch(text, ImageSizes()), split


@settings(max_examples=100, deadline=None)
@given(batches())
def test_the_parts_of_all_ranks_are_the_whole(drawn: tuple[MicroBatch, RowSplit]) -> None:
    batch, split = drawn
    parts = [part_of(batch, split, rank=rank) for rank in range(split.ranks)]
    for name in ("tokens", "labels", "loss_mask", "positions", "sources"):
        whole = torch.cat([getattr(part.text, name) for part in parts], -1)
        order = order_of(split, whole.shape[-1])
        assert torch.equal(whole, getattr(batch.text, name)[..., order])
        assert sorted(order.tolist()) == list(range(len(order)))
    for part in parts:
        assert part.row_tokens is batch.text.tokens
        assert part.text.cu_seqlens is batch.text.cu_seqlens
    # A feature is found again by its label, which is its place in the whole.
    found = torch.cat([part.text.labels.flatten()[part.text.feature_positions] - 200 for part in parts])
    assert sorted(found.tolist()) == batch.text.feature_positions.tolist()


@settings(max_examples=100, deadline=None)
@given(batches())
def test_every_trained_token_has_its_loss_in_one_part(drawn: tuple[MicroBatch, RowSplit]) -> None:
    batch, split = drawn
    losses: list[int] = []
    for rank in range(split.ranks):
        text = part_of(batch, split, rank=rank).text
        places = text.trained_positions
        assert len(places), "an output layer computes at least one loss"
        kept = places[text.loss_mask.flatten()[places] > 0]
        losses += (text.labels.flatten()[kept] - 200).tolist()
    assert sorted(losses) == batch.text.loss_mask.flatten().nonzero()[:, 0].tolist()


def test_features_of_a_colocated_encoder_move_with_their_tokens() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    none = torch.empty(0, dtype=torch.int64)
    text = TextBatch(tokens, tokens, tokens.float(), tokens, feature_positions=torch.tensor([1, 5, 6, 14]))
    batch = MicroBatch(text, ImageSizes(), features=LocalFeatures(torch.tensor([5, 6, 14]), None))
    second = part_of(batch, RowSplit(2), rank=1)
    assert second.features.positions.tolist() == [1, 2, 6] == second.text.feature_positions.tolist()
    first = part_of(replace(batch, features=LocalFeatures(none, None)), RowSplit(2), rank=0)
    assert first.text.feature_positions.tolist() == [1]


def test_the_device_gets_the_part_and_the_tokens_of_whole_rows() -> None:
    tokens = torch.arange(8).view(1, 8)
    text = TextBatch(tokens, tokens, tokens.float(), tokens, feature_positions=torch.tensor([2, 7]))
    batch = part_of(MicroBatch(text, ImageSizes()), RowSplit(2), rank=1)
    moved = batch.with_tensors({name: tensor + 1 for name, tensor in batch.host_tensors().items()})
    assert moved.text.tokens.tolist() == [[5, 6, 7, 8]]
    assert moved.row_tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_groups_that_gather_keys_have_a_run_from_either_end() -> None:
    parts = order_of(RowSplit(heads=2, groups=2), 16).view(4, -1).tolist()
    assert parts == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(1, 3), st.integers(1, 2))
def test_each_position_finds_a_later_one_of_its_row(
    drawn: tuple[MicroBatch, RowSplit], shards: int, steps: int
) -> None:
    batch, split = drawn
    length = batch.text.tokens.shape[1] * shards
    parts = split.ranks * shards
    order = order_of(split, length).view(parts, -1)
    found = followers(split, length, parts=parts, steps=steps)
    arriving = torch.cat([own[sent] for own, sent in zip(order, found.sent, strict=True)])
    for own, rows in zip(order, found.rows, strict=True):
        assert torch.equal(torch.cat([own, arriving])[rows], (own + steps) % length)
    assert found.sent.shape[1] <= 2 * steps, "of two runs at most, and none of another rank's"


def test_a_further_token_has_a_loss_where_it_is_trained_and_of_the_same_sample() -> None:
    """Samples of four and three tokens in the first row, and of five in the second; one token is padding."""
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0]]).float()
    numbers = torch.arange(16).view(2, 8)
    text = TextBatch(
        tokens=numbers,
        labels=100 + numbers,
        loss_mask=mask,
        positions=200 + numbers,
        feature_positions=torch.zeros(0, dtype=torch.int64),
        trained_positions=mask.flatten().nonzero()[:, 0],
        cu_seqlens=torch.tensor([0, 4, 7, 8, 13, 16]),
    )
    further = with_further_tokens(MicroBatch(text, ImageSizes()), 2).text
    assert torch.equal(further.loss_mask[:2], mask)
    one, two = further.loss_mask[2:4], further.loss_mask[4:]
    assert one.tolist() == [[1, 1, 0, 0, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0, 0]]
    assert two.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert further.labels[2:4][one.bool()].tolist() == [101, 102, 105, 109, 111]
    assert torch.equal(further.trained_positions, further.loss_mask.flatten().nonzero()[:, 0])
    assert further.further_positions is not None
    assert further.further_positions[1, 1, :6].tolist() == [210 + place for place in range(6)]
