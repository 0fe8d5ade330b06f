"""LLaVA-1.5 in miniature: CLIP or SigLIP towers, Llama and Mistral, tied and untied."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support.tiny_models.sizes import Samples

TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 59,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


VISION: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
}


IMAGES: tuple[Samples, ...] = ([[(32, 32), (32, 32)], []], [[], []], [[(32, 32)], [(32, 32)]])


def vicuna() -> transformers.LlavaConfig:
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, hidden_act="quick_gelu"),
        text_config=transformers.LlamaConfig(**TEXT, rms_norm_eps=1e-5),
        image_token_index=60,
    )


def mistral_tied() -> transformers.LlavaConfig:
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.MistralConfig(**TEXT, head_dim=16, sliding_window=None),
        image_token_index=60,
        tie_word_embeddings=True,
        vision_feature_layer=-1,
    )


def llama3_siglip() -> transformers.LlavaConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    return transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT, rope_parameters=rope),
        image_token_index=60,
        vision_feature_select_strategy="full",
        multimodal_projector_bias=False,
    )
