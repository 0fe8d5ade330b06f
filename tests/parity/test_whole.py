"""Whole VLMs of Transformers, and ours: logits, loss and every gradient, through the engine that training uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.internvl import InternVLVisionConfig

from megavlm.config.schema import Config, LanguageConfig, ModelConfig, ProjectorConfig, TrainConfig, VisionConfig
from megavlm.data.batch import PackedBatch
from megavlm.data.sample import Image, Sample, collate
from megavlm.planner.layers import vision_layers_run
from megavlm.planner.plan import make_plan
from megavlm.train.engine import build_engine
from tests.parity.harness import (
    OUTPUT_TOLERANCE,
    Single,
    assert_same,
    assert_same_gradients,
    gradients_of,
    load,
    parameters_of,
    pixel_values,
    random_image,
    randomize,
)
from tests.parity.mapping import CLIP, INTERN, Family, whole_to_ours

VOCABULARY, IMAGE_TOKEN, PAD_TOKEN, LENGTH = 61, 60, 0, 48
HEADS, GROUPS, LANGUAGE_LAYERS = 3, 2, 2
VISION: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": HEADS, "image_size": 32, "patch_size": 8}
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LANGUAGE_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": GROUPS,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
}
LANGUAGE = LanguageConfig(
    num_layers=LANGUAGE_LAYERS, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=GROUPS
)


@dataclass(frozen=True)
class Case:
    theirs: transformers.PreTrainedModel
    tower: Family
    ours: ModelConfig


def llava() -> Case:
    """LLaVA 1.5: CLIP without its last layer and its class token, an MLP, Llama."""
    vision = transformers.CLIPVisionConfig(
        **VISION, intermediate_size=80, num_hidden_layers=3, attn_implementation="eager", hidden_act="quick_gelu"
    )
    theirs = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    ours = ModelConfig(
        vision=VisionConfig(
            **VISION,
            ffn_hidden_size=80,
            num_layers=3,
            class_token=True,
            activation="quick_gelu",
            patch_bias=False,
            pre_norm=True,
            post_norm=False,
            feature_layer=-2,
        ),
        language=LANGUAGE,
    )
    return Case(transformers.LlavaForConditionalGeneration(theirs), CLIP, ours)


def internvl() -> Case:
    """InternVL 2.5 and 3: InternViT, 2×2 pixel shuffle, norm and MLP, Qwen2."""
    vision = InternVLVisionConfig(
        **VISION,
        intermediate_size=80,
        num_hidden_layers=2,
        attn_implementation="eager",
        attention_bias=True,
        norm_type="rms_norm",
    )
    theirs = transformers.InternVLConfig(
        vision_config=vision,
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_id=IMAGE_TOKEN,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    ours = ModelConfig(
        vision=VisionConfig(
            **VISION,
            ffn_hidden_size=80,
            num_layers=2,
            class_token=True,
            normalization="RMSNorm",
            norm_epsilon=1e-6,
            layer_scale=True,
            post_norm=False,
        ),
        projector=ProjectorConfig(pixel_shuffle=2, input_norm=True),
        language=LanguageConfig(**{**vars(LANGUAGE), "add_qkv_bias": True}),
    )
    return Case(transformers.InternVLForConditionalGeneration(theirs), INTERN, ours)


def batch_with_two_images_and_none(ours: ModelConfig) -> tuple[PackedBatch, Tensor]:
    """A sample with two images between words and one without any; also the pixels as Transformers takes them."""
    side, shuffle = VISION["image_size"], ours.projector.pixel_shuffle
    pixels = [random_image(side, side, seed=seed) for seed in (1, 2)]
    images = tuple(Image(side, side, VISION["patch_size"], partial(np.asarray, array)) for array in pixels)
    place = [IMAGE_TOKEN] * ((side // VISION["patch_size"]) ** 2 // shuffle**2)
    words = np.random.default_rng(3).integers(1, IMAGE_TOKEN, 40).tolist()
    rows = [(words[:3] + place + words[3:5] + place + words[5:12], images), (words[12:38], ())]
    samples = [Sample(np.array(row), np.arange(len(row)) >= len(row) - 6, held) for row, held in rows]
    batch = collate(
        samples,
        seq_length=LENGTH,
        image_token=IMAGE_TOKEN,
        pad_token=PAD_TOKEN,
        pixel_shuffle=shuffle,
        patch_dim=3 * VISION["patch_size"] ** 2,
        with_patches=True,
    )
    return batch, pixel_values(pixels)


@pytest.mark.parametrize("build", [llava, internvl])
def test_vlm_equals_transformers(build: Callable[[], Case], single: Single) -> None:
    case = build()
    theirs = randomize(case.theirs, seed=1)

    def to_ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return whole_to_ours(
            tensors,
            case.tower,
            vision_layers=vision_layers_run(case.ours.vision),
            vision_heads=HEADS,
            language_layers=LANGUAGE_LAYERS,
            groups=GROUPS,
        )

    config = Config(model=case.ours, train=TrainConfig(seq_length=LENGTH))
    plan = make_plan(config, single.groups.dims)
    engine = build_engine(config, plan, single.groups, vocab_size=VOCABULARY, backend=single.backend)
    chunk = engine.chunks[0].module
    load(chunk, to_ours(parameters_of(theirs)))

    batch, pixels = batch_with_two_images_and_none(case.ours)
    (logits,) = engine.schedule.logits([batch])
    expected = theirs(input_ids=batch.tokens, pixel_values=pixels)
    assert_same(logits, expected.logits, tolerance=OUTPUT_TOLERANCE, what="logits")

    labels = torch.where(batch.loss_mask.bool(), batch.labels, -100)
    loss = torch.nn.functional.cross_entropy(expected.logits.flatten(0, 1), labels.flatten())
    loss.backward()
    loss_sum, tokens = engine.schedule.train([batch]).tolist()
    assert tokens == 12
    assert loss_sum / tokens == pytest.approx(loss.item(), rel=1e-6)
    ours = {name: param.main_grad for name, param in chunk.named_parameters()}
    assert_same_gradients(ours, to_ours(gradients_of(theirs)))
