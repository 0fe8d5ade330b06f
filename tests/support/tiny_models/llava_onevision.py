"""LLaVA-OneVision in miniature, with tiles of 3 × 3 features."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support import hf
from tests.support.tiny_models.llava import TEXT
from tests.support.tiny_models.sizes import Samples

# (height, width) of each sample's images. Tiles are 3 × 3 features, an image has at most about 2 tiles' worth: 36 × 36
# is reduced, 20 × 33 and 40 × 14 lose padding, 12 × 12 is one tile; images that are not alone are their base tiles.
IMAGES: tuple[Samples, ...] = (
    [[(20, 33)], [(12, 12), (9, 30)]],
    [[(40, 14)], []],
    [[], []],
    [[(36, 36)], [(12, 12)]],
)


# (frames, height, width) of videos, beside images and alone. Transformers takes videos of one length at a time.
VIDEOS = ([[(2, 20, 33)], [(12, 12), (2, 9, 30)]], [[(3, 40, 14), (3, 12, 12)], []], [[(20, 33)], [(1, 12, 12)]])


VISION: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 12,
    "patch_size": 4,
}


def onevision(*, tied: bool = False, **options: Any) -> transformers.PreTrainedModel:
    """Untied with SigLIP's pooling head, which no feature comes from; tied without."""
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION, vision_use_head=not tied),
        text_config=transformers.Qwen2Config(**TEXT, tie_word_embeddings=tied),
        image_token_index=60,
        video_token_index=59,
        image_grid_pinpoints=hf.resolutions(VISION["image_size"]),
        vision_aspect_ratio="anyres_max_2",
        **options,
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)
