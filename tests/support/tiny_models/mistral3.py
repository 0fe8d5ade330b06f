"""Mistral 3 in miniature: Pixtral's tower in miniature, blocks of 2×2 patches, and images of several sizes."""

from __future__ import annotations

import transformers

from tests.support.tiny_models.llava import TEXT
from tests.support.tiny_models.pixtral import VISION

IMAGES = ([[(16, 16), (24, 8)], []], [[], []], [[(8, 16)], [(16, 8)]])


def mistral3(*, tied: bool = False) -> transformers.PreTrainedModel:
    """The projector's norm has the text's epsilon, another than the tower's: large, so that it shows."""
    text = transformers.MistralConfig(**TEXT, head_dim=10, sliding_window=None, rms_norm_eps=1e-2)
    config = transformers.Mistral3Config(
        vision_config=transformers.PixtralVisionConfig(**VISION),
        text_config=text,
        image_token_index=60,
        multimodal_projector_bias=tied,
        tie_word_embeddings=tied,
    )
    return transformers.Mistral3ForConditionalGeneration(config)
