"""GLM-4.1V in miniature: heads of twelve channels of which six rotate, a pair each with time, height and width."""

from __future__ import annotations

import transformers

from tests.support.tiny_models.qwen_vl import TEXT, TOKENS, VISION

ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}


def glm4v(*, tied: bool = False) -> transformers.PreTrainedModel:
    """Positions of six by six patches, which most images have not."""
    config = transformers.Glm4vConfig(
        vision_config={
            **VISION,
            "intermediate_size": 52,
            "out_hidden_size": 48,
            "image_size": 24,
            "rms_norm_eps": 1e-3,
        },
        text_config={
            **TEXT,
            "hidden_size": 48,
            "num_attention_heads": 4,
            "rope_parameters": ROPE,
            "rms_norm_eps": 1e-4,
        },
        tie_word_embeddings=tied,
        **{name: value for name, value in TOKENS.items() if name.endswith(("image_token_id", "video_token_id"))},
    )
    return transformers.Glm4vForConditionalGeneration(config)
