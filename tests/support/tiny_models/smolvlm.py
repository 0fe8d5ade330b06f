"""SmolVLM and Idefics3 in miniature, and images smaller and larger than their towers."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support.tiny_models.llava import TEXT
from tests.support.tiny_models.sizes import Samples

# Transformers takes images of one size at a time: the tower's own (6 × 6 patches), larger ones, smaller ones, none.
IMAGES: tuple[Samples, ...] = (
    [[(24, 24), (24, 24)], []],
    [[(32, 32)], [(32, 32)]],
    [[(16, 16)] * 3, [(16, 16)]],
    [[], []],
)


VISION: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 26,  # 6 patches, and two pixels that no patch has
    "patch_size": 4,
}


OPTIONS: dict[str, Any] = {"vision_config": VISION, "image_token_id": 60, "scale_factor": 2}


def smolvlm() -> transformers.PreTrainedModel:
    text = {"model_type": "llama", **TEXT, "rms_norm_eps": 1e-5}
    return transformers.SmolVLMForConditionalGeneration(transformers.SmolVLMConfig(text_config=text, **OPTIONS))


def idefics3() -> transformers.PreTrainedModel:
    text = {"model_type": "llama", **TEXT, "head_dim": 10}
    config = transformers.Idefics3Config(text_config=text, tie_word_embeddings=True, **OPTIONS)
    return transformers.Idefics3ForConditionalGeneration(config)
