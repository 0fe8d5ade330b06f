"""Gemma-3 in miniature: a window of five tokens that images of four reach across, every third layer without one."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support.tiny_models.sizes import Samples

IMAGES: tuple[Samples, ...] = ([[(32, 32), (32, 32)], []], [[], []], [[(32, 32)], [(32, 32)]])
IMAGE_TOKEN = 60

VISION: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
}
TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "query_pre_attn_scalar": 13,
    "max_position_embeddings": 512,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}


def small(**text: Any) -> transformers.Gemma3Config:
    return transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=transformers.Gemma3TextConfig(**{**TEXT, **text}),
        mm_tokens_per_image=4,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=58,
        eoi_token_index=59,
    )


def gemma3(**text: Any) -> transformers.PreTrainedModel:
    return transformers.Gemma3ForConditionalGeneration(small(**text))
