"""GLM-4.1V and GLM-4.5V in miniature: six of a head's twelve channels rotate, a pair with each axis of a position."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.support.tiny_models.qwen_vl import TEXT, TOKENS, VISION

ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}

TOWER = {**VISION, "intermediate_size": 52, "out_hidden_size": 48, "image_size": 24, "rms_norm_eps": 1e-3}
MARKS = {name: value for name, value in TOKENS.items() if name.endswith(("image_token_id", "video_token_id"))}


def glm4v(*, tied: bool = False) -> transformers.PreTrainedModel:
    """Positions of six by six patches, which most images have not."""
    config = transformers.Glm4vConfig(
        vision_config=TOWER,
        text_config={
            **TEXT,
            "hidden_size": 48,
            "num_attention_heads": 4,
            "rope_parameters": ROPE,
            "rms_norm_eps": 1e-4,
        },
        tie_word_embeddings=tied,
        **MARKS,
    )
    return transformers.Glm4vForConditionalGeneration(config)


def glm4v_moe(*, tied: bool = False, **text: Any) -> transformers.PreTrainedModel:
    """Eight experts after one dense layer, two that every token takes, and biases that change which are chosen."""
    config = transformers.Glm4vMoeConfig(
        vision_config=TOWER,
        text_config={
            **TEXT,
            "hidden_size": 48,
            "num_attention_heads": 4,
            "head_dim": 12,
            "rope_parameters": ROPE,
            "rms_norm_eps": 1e-4,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.75,
            "first_k_dense_replace": 1,
            **text,
        },
        tie_word_embeddings=tied,
        **MARKS,
    )
    model = transformers.Glm4vMoeForConditionalGeneration(config)
    for number, layer in enumerate(model.model.language_model.layers[1:]):
        bias = layer.mlp.gate.e_score_correction_bias
        bias.copy_(torch.linspace(-0.2, 0.2, 8).roll(3 * number))
    return model
