"""M-RoPE: which pair of channels turns with which axis."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.config.schema import LanguageConfig
from megavlm.model.rotary import mrope_axes, rope

SECTION = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))


def test_sections_divide_the_pairs() -> None:
    assert mrope_axes((2, 1, 1), interleaved=False) == [0, 0, 1, 2]


def test_interleaved_axes_alternate_until_they_have_their_number() -> None:
    assert mrope_axes((3, 2, 1), interleaved=True) == [0, 1, 2, 0, 1, 0]
    assert Counter(mrope_axes((24, 20, 20), interleaved=True)) == {0: 24, 1: 20, 2: 20}


@given(SECTION, st.booleans())
def test_every_pair_has_an_axis(section: tuple[int, ...], interleaved: bool) -> None:
    axes = mrope_axes(section, interleaved=interleaved)
    assert len(axes) == sum(section)
    assert set(axes) <= {0, 1, 2}


@given(st.booleans())
def test_text_turns_as_without_mrope(interleaved: bool) -> None:
    """Where the three positions are equal, the axes make no difference."""
    plain = LanguageConfig(hidden_size=32, num_attention_heads=2, kv_channels=16)
    mrope = LanguageConfig(
        hidden_size=32, num_attention_heads=2, kv_channels=16, mrope_section=(3, 3, 2), mrope_interleaved=interleaved
    )
    positions = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])
    assert torch.equal(rope(positions.expand(3, 2, 4), mrope), rope(positions, plain))
