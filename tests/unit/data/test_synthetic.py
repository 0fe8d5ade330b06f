"""Synthetic samples: sizes, shares, and nothing but the seed and the index."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.arch.image_tokens import TileGroup, tokens_per_grid
from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config, DataConfig, ProjectorConfig, TrainConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.synthetic import SyntheticSource, entropy
from megavlm.errors import UserError


def config(
    data: DataConfig | None = None, *, seq_length: int = 64, global_batch_size: int = 8, seed: int = 1
) -> Config:
    return Config(
        train=TrainConfig(seq_length=seq_length, global_batch_size=global_batch_size, seed=seed),
        data=data or DataConfig(),
    )


@settings(max_examples=40, deadline=None)
@given(index=st.integers(0, 2**40), seed=st.integers(0, 2**31), share=st.floats(0.0, 1.0))
def test_a_sample_is_well_formed(index: int, seed: int, share: float) -> None:
    data = DataConfig(images_per_sample=(1, 3, 0), image_sizes=(16, 8, 32), answer_share=share, imageless_share=0.3)
    source = SyntheticSource(config(data, seed=seed))
    sample = source.sample(index)
    image_tokens = sample.tokens == source.image_token
    assert len(sample) == 64
    assert image_tokens.sum() == sum(tokens_per_grid(grid, ProjectorConfig()) for grid in sample.grids)
    assert sample.tokens.min() > source.pad_token
    assert sample.tokens.max() < source.vocab_size
    assert sample.trained.any(), "every sample has an answer"
    assert not sample.trained[0], "nothing precedes the first token"
    assert not (sample.trained & image_tokens).any()
    for image in sample.images:
        pixels = image.render()
        assert pixels.shape == (image.height, image.width, 3)
        assert pixels.dtype == np.uint8
        assert np.array_equal(pixels, image.render())


def test_text_has_no_token_of_images_and_videos() -> None:
    some = config(DataConfig(images_per_sample=(0,)), seq_length=512)
    source = SyntheticSource(replace(some, model=replace(some.model, image_token=20, video_token=7)))
    drawn = np.concatenate([source.sample(index).tokens for index in range(40)])
    assert set(range(1, source.vocab_size)) - set(drawn.tolist()) == {7, 20}


def test_samples_depend_on_the_seed_and_the_index_alone() -> None:
    first, again, other = (SyntheticSource(config(seed=seed)) for seed in (1, 1, 2))
    again.sample(11)
    assert np.array_equal(first.sample(3).tokens, again.sample(3).tokens)
    assert np.array_equal(first.sample(3).images[0].render(), again.sample(3).images[0].render())
    assert not np.array_equal(first.sample(3).tokens, first.sample(4).tokens)
    assert not np.array_equal(first.sample(3).tokens, other.sample(3).tokens)
    assert not np.array_equal(first.sample(3).images[0].render(), other.sample(3).images[0].render())


def test_counts_cycle_over_samples_and_sizes_over_images() -> None:
    source = SyntheticSource(config(DataConfig(images_per_sample=(1, 2), image_sizes=(8, 16, 24))))
    sides = [[image.height for image in source.sample(index).images] for index in range(4)]
    assert sides == [[8], [16, 24], [8], [16, 24]]


def test_imageless_share_is_met_and_imageless_places_are_exact() -> None:
    source = SyntheticSource(config(DataConfig(imageless_share=0.25)))
    share = np.mean([not source.sample(index).images for index in range(2000)])
    assert abs(share - 0.25) < 0.04  # 4 standard deviations of 2,000 draws
    source = SyntheticSource(config(DataConfig(imageless_samples=(0, 5)), global_batch_size=8))
    assert [index for index in range(16) if not source.sample(index).images] == [0, 5, 8, 13]


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (config(seq_length=17), "--seq-length 17 .* at least 18"),
        (config(DataConfig(images_per_sample=(1, 4))), "--seq-length 64 .* 4 image.* at least 66"),
        (config(DataConfig(image_sizes=(32, 64)), seq_length=65), "--seq-length 65 .* at least 66"),
        (config(DataConfig(image_sizes=(20,))), "model.vision.patch_size"),
    ],
)
def test_sizes_that_do_not_fit_name_the_option(changed: Config, match: str) -> None:
    with pytest.raises(UserError, match=match):
        SyntheticSource(changed)


def test_text_has_the_entropy_it_says() -> None:
    """Measured on the pairs of 200 samples, images left out: −Σ p(a, b) ln p(b | a)."""
    sizes = config(DataConfig(images_per_sample=(0, 1), image_sizes=(16,)), seq_length=400)
    language = replace(sizes.model.language, vocab_size=12)
    source = SyntheticSource(replace(sizes, model=replace(sizes.model, language=language)))
    pairs = np.zeros((12, 12))
    for index in range(200):
        text = source.sample(index).tokens
        text = text[text != source.image_token]
        np.add.at(pairs, (text[:-1], text[1:]), 1)
    assert not pairs[0].any(), "padding is no text"
    given_first = pairs / np.maximum(pairs.sum(1, keepdims=True), 1)
    measured = -(pairs * np.log(np.where(pairs > 0, given_first, 1))).sum() / pairs.sum()
    assert measured == pytest.approx(entropy(10), rel=0.01)


def test_synthetic_images_are_tiled_where_they_are_alone() -> None:
    flags = (
        "--set model.vision.image_size=8 model.vision.patch_size=4 --image-sizes 16 --images-per-sample 1 2 0 "
        "--seq-length 40"
    )
    given_config = parse([*flags.split(), "--set", "model.projector.anyres_max_tiles=4"])
    source = SyntheticSource(given_config)
    batch = collate(
        [[sample] for sample in [source.sample(index) for index in range(3)]],
        CollateSpec.of(given_config, source, seq_length=40),
    )
    assert batch.image_sizes.tile_groups == (
        TileGroup((2, 2), (16, 16)),
        TileGroup((0, 0), (16, 16)),
        TileGroup((0, 0), (16, 16)),
    )
    assert (batch.text.tokens == source.image_token).sum(1).tolist() == [4 + 4 * 5, 2 * (4 + 1), 0]
    assert batch.image_sizes.grids == ((2, 2),) * 7
    assert batch.images.patches.shape[0] == batch.image_sizes.num_patches == 28
    assert batch.image_sizes.num_images == 3
