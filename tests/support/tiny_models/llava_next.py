"""LLaVA-NeXT in miniature: CLIP with a class token, and tiles of 3 × 3 features of which none are reduced."""

from __future__ import annotations

import transformers

from tests.support import hf
from tests.support.tiny_models.llava import TEXT
from tests.support.tiny_models.llava_onevision import VISION
from tests.support.tiny_models.sizes import Samples

# (height, width) of one image a sample: up to two tiles wide or high, with padding above and below, left and right, or
# none.
IMAGES: tuple[Samples, ...] = (
    [[(6, 24)], [(12, 12)]],
    [[(24, 7)], []],
    [[], []],
    [[(12, 24)], [(9, 20)]],
)


def llava_next(*, tied: bool = False) -> transformers.PreTrainedModel:
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.MistralConfig(**TEXT, head_dim=10, sliding_window=None),
        image_token_index=60,
        image_grid_pinpoints=hf.resolutions(VISION["image_size"]),
        tie_word_embeddings=tied,
    )
    return transformers.LlavaNextForConditionalGeneration(config)
