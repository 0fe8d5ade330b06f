"""Pixtral in miniature: a LLaVA with a Pixtral tower and Mistral, and images of several sizes."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support.tiny_models.llava import TEXT
from tests.support.tiny_models.sizes import Samples

IMAGES: tuple[Samples, ...] = ([[(16, 16), (24, 8)], []], [[], []], [[(8, 16)], [(16, 8)]])

# Heads of 12 channels: three pairs of frequencies for rows and three for columns.
VISION: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 4,
    "hidden_act": "silu",
}


def pixtral(*, tied: bool = False) -> transformers.PreTrainedModel:
    text = transformers.MistralConfig(**TEXT, head_dim=10, sliding_window=None, rms_norm_eps=1e-5)
    config = transformers.LlavaConfig(
        vision_config=transformers.PixtralVisionConfig(**VISION),
        text_config=text,
        image_token_index=60,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=tied,
    )
    return transformers.LlavaForConditionalGeneration(config)
