"""LightOnOCR: Pixtral's tower and Mistral 3's merger before Qwen3.

An image is one run of tokens, without marker tokens. The sides of a resized image are multiples of a patch, not of a
feature: the tower sees a leftover row or column of patches, but no feature includes it. Some folders have model_type
mistral3; their `architectures` entry then identifies LightOnOCR.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.config.schema import ModelConfig
from megavlm.families import mistral3, pixtral
from megavlm.families.shared.chat import CHATML
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.language import language
from megavlm.families.shared.settings import Settings
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Layout, Prompt
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import Json, sides, square

IMAGE = "<|image_pad|>"
TYPES = ("lighton_ocr", *(f"mistral3/{name}ForConditionalGeneration" for name in ("LightOnOcr", "LightOnOCR")))


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a LightOnOcrConfig."""
    text, tower = settings.section("text_config"), settings.section("vision_config")
    tower.require("model_type", "pixtral", why="only Pixtral's tower is known here")
    tied = settings.get("tie_word_embeddings", True)
    language_model = language(text, kind=text.get("model_type", "qwen3"), tied=tied)
    return ModelConfig(
        vision=pixtral.vision(tower),
        projector=mistral3.merger(settings, language_model, bias=False),
        language=language_model,
        image_token=settings.get("image_token_id", 151655),
    )


@dataclass(frozen=True, kw_only=True)
class WholePatches(pixtral.RowsOfFeatures):
    """Shrinks an image to at most `edge` pixels a side, rounded up to multiples of `multiple`; writes no markers."""

    multiple: int

    @property
    def factor(self) -> int:
        return self.multiple

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(*self._resized((height, width)))
        if min(tile.grid) < self.projector.pixel_shuffle:
            raise BadSample(Reason.TOO_NARROW, f"{height}×{width} pixels are no feature")
        prompt = Prompt(self.image_token, ("", ""), (tokens_per_grid(tile.grid, self.projector),))
        return Layout((height, width), (tile,), (0, 0), prompt)


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    multiple = square(sides(options["patch_size"], "patch_size"), "patch_size")
    made: Any = pixtral.build_processor(options, model, shared)
    own = {"placeholder": IMAGE, "image_token": IMAGE, "multiple": multiple}
    return WholePatches(**{**shared, **own, "edge": made.edge})


FAMILY = Family(
    name="lighton_ocr",
    model_types=TYPES,
    config=config,
    table=mistral3.table,
    inputs=pixtral.inputs,
    name_prefixes=(NamePrefixes("model.vision_encoder.", "model.vision_projection.", "model.language_model."),),
    image_processors=(
        replace(
            pixtral.PROCESSOR,
            defaults={**pixtral.PROCESSOR.defaults, "patch_size": 16},
            build=build_processor,
            model_types=TYPES,
        ),
    ),
    image_text=IMAGE,
    chat_template=CHATML,
    runs="LightOnOcrForConditionalGeneration",  # also where folders name Mistral 3's type and spell the class otherwise
)
