"""InternVL in miniature, with both kinds of InternViT."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.models.internvl import InternVLVisionConfig

from tests.support.tiny_models.llava import TEXT

VISION: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "image_size": [32, 32],
    "patch_size": [8, 8],
}


def small(**text: Any) -> transformers.InternVLConfig:
    """InternViT-300M's kind: LayerNorm, biases."""
    return transformers.InternVLConfig(
        vision_config=InternVLVisionConfig(**VISION, attention_bias=True),
        text_config=transformers.Qwen2Config(**TEXT, **text),
        image_token_id=60,
        tie_word_embeddings=False,
    )


def large() -> transformers.InternVLConfig:
    """InternViT-6B's kind: RMSNorm, normalised queries and keys, no biases there; a language model with tied ends."""
    return transformers.InternVLConfig(
        vision_config=InternVLVisionConfig(**VISION, norm_type="rms_norm", use_qk_norm=True),
        text_config=transformers.Qwen3Config(**TEXT, head_dim=12),
        image_token_id=60,
        tie_word_embeddings=True,
    )


def mixture(**text: Any) -> transformers.InternVLConfig:
    """InternVL3.5's kind: Qwen3-MoE, here with weights of a token's experts that add up to less than 1."""
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    return transformers.InternVLConfig(
        vision_config=InternVLVisionConfig(**VISION, attention_bias=True),
        text_config=transformers.Qwen3MoeConfig(**TEXT, **{"head_dim": 12, "norm_topk_prob": False, **experts, **text}),
        image_token_id=60,
        tie_word_embeddings=False,
    )
