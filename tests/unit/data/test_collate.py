"""Collation: what is predicted, what is trained, which token takes which feature."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megavlm.config.schema import ProjectorConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.synthetic import SyntheticSource
from megavlm.data.types import NEGATIVE, POSITIVE, QUERY, Member, Sample
from megavlm.errors import UserError
from megavlm.inputs.batch import MicroBatch
from megavlm.inputs.patches import Image
from megavlm.objective.gather import Texts
from tests.support.flags import resolved

IMAGE, PAD, PATCH = 99, 0, 4


def flat(shade: int, *, height: int = PATCH, width: int = PATCH) -> Image:
    """An image of one shade of grey."""
    return Image(
        height=height, width=width, patch_size=PATCH, render=lambda: np.full((height, width, 1), shade, dtype=np.uint8)
    )


def text(tokens: list[int], *, answer: int, images: tuple[Image, ...] = ()) -> Sample:
    """A sample whose last `answer` tokens are trained."""
    trained = np.arange(len(tokens)) >= len(tokens) - answer
    return Sample(tokens=np.array(tokens, dtype=np.int64), trained=trained, images=images)


def batch(
    samples: list[Sample], *, seq_length: int = 8, pixel_shuffle: int = 1, with_patches: bool = True
) -> MicroBatch:
    """Each sample in a row of its own."""
    rows = [[sample] for sample in samples]
    return packed_batch(rows, seq_length=seq_length, pixel_shuffle=pixel_shuffle, with_patches=with_patches)


def packed_batch(
    rows: list[list[Sample]],
    *,
    seq_length: int = 8,
    pixel_shuffle: int = 1,
    with_patches: bool = True,
    mrope: bool = False,
) -> MicroBatch:
    return collate(
        rows,
        CollateSpec(
            seq_length=seq_length,
            image_token=IMAGE,
            pad_token=PAD,
            projector=ProjectorConfig(pixel_shuffle=pixel_shuffle),
            patch_dim=PATCH**2,
            mrope=mrope,
            num_sources=2,
        ),
        with_patches=with_patches,
    )


def test_a_position_is_trained_where_the_next_token_is_an_answer() -> None:
    given_batch = batch([text([5, 6, 7, 8, 9], answer=2), text([3, 4], answer=1)])
    assert given_batch.text.tokens.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0], [3, 4, 0, 0, 0, 0, 0, 0]]
    assert given_batch.text.labels.tolist() == [[6, 7, 8, 9, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0, 0]]
    assert given_batch.text.loss_mask.tolist() == [[0, 0, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    assert given_batch.text.positions.tolist() == [list(range(8))] * 2
    assert given_batch.text.num_tokens == 7
    assert given_batch.text.loss_mask.dtype == torch.float32


def test_samples_of_a_row_are_kept_apart() -> None:
    first = text([5, IMAGE, 6], answer=2, images=(flat(10),))
    second = replace(text([7, 8], answer=2), source=1)
    given_batch = packed_batch([[first, second], [text([3], answer=0)]], seq_length=6)
    assert given_batch.text.tokens.tolist() == [[5, IMAGE, 6, 7, 8, 0], [3, 0, 0, 0, 0, 0]]
    assert given_batch.text.positions.tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert given_batch.text.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0], [0] * 6], "no sample predicts the next one"
    assert given_batch.text.cu_seqlens.tolist() == [0, 3, 5, 6, 7, 12]
    assert given_batch.text.sources.tolist() == [[0, 0, 0, 1, 1, 0], [0] * 6]
    assert given_batch.text.lengths == (3, 2, 1)
    assert given_batch.text.feature_positions.tolist() == [1]


def test_what_the_host_must_know_stays_there() -> None:
    packed = packed_batch([[text([5, 6], answer=1), text([7], answer=0)], [text([3], answer=0)]], seq_length=6)
    moved = packed.to("meta")
    assert moved.text.tokens.device.type == "meta"
    assert moved.text.cu_seqlens is packed.text.cu_seqlens
    assert moved.text.positions.shape == (2, 6), "rows differ"
    assert batch([text([5, 6], answer=1), text([3, 4], answer=1)]).to("meta").text.positions.shape == (1, 8)


def test_positions_of_three_axes_restart_too() -> None:
    wide = text([5, IMAGE, IMAGE, 6], answer=1, images=(flat(1, width=2 * PATCH),))
    alone = packed_batch([[wide]], seq_length=4, mrope=True).text.positions[:, 0]
    twice = packed_batch([[wide, wide]], mrope=True).text.positions[:, 0]
    assert torch.equal(twice, torch.cat([alone, alone], dim=1))


def test_features_follow_the_images_sample_by_sample() -> None:
    two = text([IMAGE, 5, IMAGE, 6], answer=1, images=(flat(10), flat(20)))
    none = text([7, 8], answer=1)
    wide = text([9, IMAGE, IMAGE], answer=1, images=(flat(30, width=2 * PATCH),))
    given_batch = batch([two, none, wide], seq_length=4)
    assert given_batch.image_sizes.grids == ((1, 1), (1, 1), (1, 2))
    assert given_batch.image_sizes.num_patches == 4
    assert given_batch.text.feature_positions.tolist() == [0, 2, 9, 10]
    shades = ((given_batch.images.patches.mean(dim=1) / 2 + 0.5) * 255).round().int().tolist()
    assert shades == [10, 20, 30, 30]


def test_a_sample_that_is_too_long_names_the_length_it_needs() -> None:
    with pytest.raises(UserError, match="--seq-length is 8: set --seq-length to at least 9"):
        batch([text([1] * 9, answer=1)])


@pytest.mark.parametrize(("objective", "terms"), [("contrastive", [3, 1]), ("sigmoid", [2, 1])])
def test_rows_of_texts_count_the_terms_of_their_loss(objective: str, terms: list[int]) -> None:
    """A pair for each positive, or a term for each query, which the balance losses of experts are weighted by."""
    spec = CollateSpec.of(resolved(["--objective", objective, "--seq-length", "16"]), SyntheticSource(resolved([])))
    rows = [[record(POSITIVE, POSITIVE, NEGATIVE), record(POSITIVE)], [record(POSITIVE, NEGATIVE)]]
    found = collate(rows, spec).text
    assert found.row_counts == ((12, terms[0]), (6, terms[1]))
    texts = Texts(found.members)
    assert sum(terms) == len(texts.queries if objective == "sigmoid" else texts.pairs[0])


def record(*documents: int) -> Sample:
    """A record of a query and documents of these roles, each of two tokens."""
    members = tuple(Member(role, number, 2) for number, role in enumerate((QUERY, *documents)))
    return replace(text(np.arange(1, 1 + 2 * len(members)).tolist(), answer=0), members=members)
