"""CLIP, SigLIP and InternViT of Transformers, and ours: the same features and gradients from the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from transformers.models.internvl import InternVLVisionConfig, InternVLVisionModel

from megavlm.arch.layers import PROJECTOR, layer_names
from megavlm.config.schema import Config, ModelConfig, VisionConfig
from megavlm.families import FAMILIES
from megavlm.families.shared.table import Table
from megavlm.families.shared.vision import clip_table, intern_table, siglip_table
from tests.support.gates import hold
from tests.support.harness import (
    OUTPUT_TOLERANCE,
    Single,
    assert_same,
    assert_same_gradients,
    difference,
    gradients_of,
    image_batch,
    load,
    parameters_of,
    pixel_values,
    random_image,
    randomize,
)
from tests.support.mapping import shapes_of, to_ours

SIZES: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
THEIRS: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "attn_implementation": "eager",
}
OURS: dict[str, Any] = {**SIZES, "ffn_hidden_size": 80, "num_layers": 4}


@dataclass(frozen=True)
class Case:
    theirs: transformers.PreTrainedModel
    table: Callable[[VisionConfig, str], Table]
    ours: VisionConfig


def clip(*, feature_layer: int) -> Case:
    config = transformers.CLIPVisionConfig(**THEIRS, hidden_act="quick_gelu", layer_norm_eps=1e-5)
    ours = VisionConfig(
        **OURS,
        class_token=True,
        activation="quick_gelu",
        patch_bias=False,
        pre_norm=True,
        post_norm=False,
        feature_layer=feature_layer,
    )
    return Case(transformers.CLIPVisionModel(config), clip_table, ours)


def siglip(*, post_norm: bool) -> Case:
    config = transformers.SiglipVisionConfig(
        **THEIRS,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-6,
        vision_use_head=False,
        tie_last_hidden_states=post_norm,  # whether the last of the hidden states comes after the norm
    )
    ours = VisionConfig(
        **OURS,
        activation="gelu_tanh",
        norm_epsilon=1e-6,
        post_norm=post_norm,
        feature_layer=-1 if post_norm else -2,
    )
    return Case(transformers.SiglipVisionModel(config), siglip_table, ours)


def intern_300m() -> Case:
    """LayerNorm, biases of query, key and value, a last norm."""
    config = InternVLVisionConfig(
        **THEIRS, norm_type="layer_norm", attention_bias=True, use_mean_pooling=False, tie_last_hidden_states=True
    )
    ours = VisionConfig(**OURS, class_token=True, norm_epsilon=1e-6, layer_scale=True)
    return Case(InternVLVisionModel(config), intern_table, ours)


def intern_6b() -> Case:
    """RMSNorm, queries and keys normalised over all heads, no biases of query, key and value, but elsewhere."""
    config = InternVLVisionConfig(**THEIRS, norm_type="rms_norm", attention_bias=False, use_qk_norm=True)
    ours = VisionConfig(
        **OURS,
        class_token=True,
        normalization="RMSNorm",
        norm_epsilon=1e-6,
        add_qkv_bias=False,
        qk_norm="full",
        layer_scale=True,
        post_norm=False,
    )
    return Case(InternVLVisionModel(config), intern_table, ours)


FAMILY_OF = {kind: family.name for family in FAMILIES for kind in family.model_types}
CASES = {
    "clip": lambda: clip(feature_layer=-2),
    "clip-last-layer": lambda: clip(feature_layer=-1),
    "siglip": lambda: siglip(post_norm=True),
    "siglip-second-to-last-layer": lambda: siglip(post_norm=False),
    "internvit-300m": intern_300m,
    "internvit-6b": intern_6b,
}


def compare(case: Case, single: Single, *, height: int, width: int, **options: Any) -> None:
    theirs = randomize(case.theirs, seed=1)
    family = FAMILY_OF[theirs.config.model_type]
    config = Config(model=ModelConfig(vision=case.ours))
    names = layer_names(config.model)
    chunk = single.chunk(config, names[: names.index(PROJECTOR)], vocab_size=1)
    table, shapes = case.table(case.ours, ""), shapes_of(chunk)
    load(chunk, to_ours(parameters_of(theirs), table, shapes))

    images = [random_image(height, width, seed=seed) for seed in (2, 3)]
    features = chunk(image_batch(images, patch_size=8))[:, 0].unflatten(0, (len(images), -1))
    expected = theirs(pixel_values(images), output_hidden_states=True, **options).hidden_states[case.ours.feature_layer]
    assert_same(features, expected, tolerance=OUTPUT_TOLERANCE, what="features")
    hold(family, "logits", difference(features, expected, "features"))

    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    (features * direction).sum().backward()
    (expected * direction).sum().backward()
    assert_same_gradients(gradients_of(chunk), to_ours(gradients_of(theirs), table, shapes), family=family)


@pytest.mark.parametrize("name", CASES)
def test_vision_tower_equals_transformers(name: str, single: Single) -> None:
    compare(CASES[name](), single, height=32, width=32)


@pytest.mark.parametrize(("height", "width"), [(48, 48), (24, 56)])
def test_interpolated_positions_equal_transformers(height: int, width: int, single: Single) -> None:
    compare(clip(feature_layer=-2), single, height=height, width=width, interpolate_pos_encoding=True)
