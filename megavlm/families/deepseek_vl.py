"""DeepSeek-VL with one tower (1.3B): SigLIP with its last norm, a two-layer MLP and Llama.

The larger model adds SAM's tower and is not supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megavlm.config.schema import ModelConfig, ProjectorConfig
from megavlm.errors import UserError
from megavlm.families.llava import whole_table
from megavlm.families.shared.chat import template
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import tokens_and_pixels
from megavlm.families.shared.language import language
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table
from megavlm.families.shared.vision import siglip, siglip_table
from megavlm.inputs.processor import Processor, Whole, pad_to_square
from megavlm.inputs.reader import CLIP_PIXELS, Json, ProcessorReader, sides, square
from megavlm.inputs.resize import Pixels

IMAGE = "<image_placeholder>"


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a DeepseekVLConfig.

    Files from before Transformers 5, which published ones are, have tie_word_embeddings in the text's section.
    """
    tower, text = settings.section("vision_config"), settings.section("text_config")
    tower.require("model_type", "siglip_vision_model", why="only SigLIP towers are known here")
    text.require("model_type", "llama", why="only Llama is known here")
    return ModelConfig(
        vision=siglip(tower, feature_layer=-1, post_norm=True),
        projector=ProjectorConfig(kind="mlp"),
        language=language(text, tied=settings.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        image_token=settings.get("image_token_id", 100015),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    return whole_table(siglip_table(model.vision, prefixes.vision), model, prefixes, ("linear1", "linear2"))


@dataclass(frozen=True, kw_only=True)
class Fitted(Whole):
    """Resizes an image so that its longer side fits the tower, and pads it to a square with the mean colour."""

    least: int  # pixels of the shorter side

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        assert self.size is not None
        scale = self.size[0] / max(pixels.shape[:2])
        height, width = (max(round(side * scale), self.least) for side in pixels.shape[:2])
        return [pad_to_square(self._resize(pixels, height, width), self.mean)]


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor. Raises UserError if its images would not be squares of `size`."""
    side = square(sides(options["size"], "size"), "size")
    if not options["do_pad"] or options["min_size"] > side:
        raise UserError(f"preprocessor_config.json must have do_pad true and a min_size of at most {side}, its size")
    return Fitted(size=(side, side), least=options["min_size"], placeholder=IMAGE, image_token=IMAGE, **shared)


FAMILY = Family(
    name="deepseek_vl",
    model_types=("deepseek_vl",),
    config=config,
    table=table,
    inputs=tokens_and_pixels,
    # Files from before Transformers 5 nest the tower's modules in a `vision_model`.
    name_prefixes=tuple(
        NamePrefixes(f"model.vision_model.{nested}", "model.aligner.", "model.language_model.")
        for nested in ("", "vision_model.")
    ),
    image_processors=(
        ProcessorReader(
            ("DeepseekVL",),
            {**CLIP_PIXELS, "size": {"height": 384, "width": 384}, "min_size": 14, "do_pad": True},
            build_processor,
        ),
    ),
    image_text=IMAGE,
    chat_template=template("deepseek_vl"),
    unused=(r".*vision_model\.head\..*", r".*\.position_ids|.*\.rotary_emb\.inv_freq"),
)
