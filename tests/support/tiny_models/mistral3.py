"""Mistral 3 in miniature: Pixtral's tower in miniature, blocks of 2×2 patches, and images of several sizes."""

from __future__ import annotations

import transformers

from tests.support.tiny_models.llava import TEXT
from tests.support.tiny_models.pixtral import VISION
from tests.support.tiny_models.sizes import Samples

IMAGES: tuple[Samples, ...] = ([[(16, 16), (24, 8)], []], [[], []], [[(8, 16)], [(16, 8)]])


# Of five pairs of channels two keep their frequencies, one has a quarter, two lie between; scores grow by 13 %.
YARN = {
    **{"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 64},
    **{"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.1},
}


def mistral3(*, tied: bool = False) -> transformers.PreTrainedModel:
    return _model(transformers.MistralConfig(**_TEXT), tied=tied)


def ministral3() -> transformers.PreTrainedModel:
    return _model(transformers.Ministral3Config(**_TEXT, rope_parameters=YARN), tied=True)


# The projector's norm has the text's epsilon, another than the tower's: large, so that it shows.
_TEXT = {**TEXT, "head_dim": 10, "sliding_window": None, "rms_norm_eps": 1e-2}


def _model(text: transformers.PreTrainedConfig, *, tied: bool) -> transformers.PreTrainedModel:
    config = transformers.Mistral3Config(
        vision_config=transformers.PixtralVisionConfig(**VISION),
        text_config=text,
        image_token_index=60,
        multimodal_projector_bias=tied,
        tie_word_embeddings=tied,
    )
    return transformers.Mistral3ForConditionalGeneration(config)
