"""Kimi-VL (A3B): Kimi-K2.5's tower, merger and language model under other names, for images alone.

Transformers has no class for it. Of an image Kimi-K2.5's computes the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavlm.config.schema import ModelConfig
from megavlm.errors import UserError
from megavlm.families import kimi_k25
from megavlm.families.shared.chat import template
from megavlm.families.shared.family import NamePrefixes
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table, linear
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import CLIP_PIXELS, Json, ProcessorReader, require_model_value
from megavlm.json_files import FLAG, whole

_MOST_OF_SIDE = 510  # patches: the published processor refuses sides of 512
_RANGES = {"in_token_limit": whole(1, 2**20), "pad_input": FLAG}
_DEFAULTS = {**CLIP_PIXELS, "patch_size": 14, "merge_kernel_size": [2, 2], "in_token_limit": 4096, "pad_input": False}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a published config.json, in which the text says whether embeddings are tied."""
    tied = settings.section("text_config").get("tie_word_embeddings", False)
    return kimi_k25.config(Settings({"tie_word_embeddings": tied, **settings.values}, settings.where))


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    names = kimi_k25.table(model, prefixes)
    for number in (1, 2):
        names |= linear(f"projector.linear_fc{number}", f"{prefixes.projector}linear_{number}", bias=True)
    return names


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor. Raises UserError for a patch or merge size other than the model's, or cropping."""
    patch, merge = model.vision.patch_size, model.projector.pixel_shuffle
    require_model_value(options, "patch_size", patch)
    if options["merge_kernel_size"] != [merge, merge] or not options["pad_input"]:
        raise UserError(
            f"preprocessor_config.json must have merge_kernel_size [{merge}, {merge}] and pad_input true: correct it"
        )
    bounds = kimi_k25.Bounds(options["in_token_limit"], _MOST_OF_SIDE, patch, patch * merge)
    return kimi_k25.Padded(**shared, bounds=bounds, placeholder=kimi_k25.IMAGE, image_token=kimi_k25.IMAGE)


FAMILY = replace(
    kimi_k25.FAMILY,
    name="kimi_vl",
    model_types=("kimi_vl",),
    config=config,
    table=table,
    name_prefixes=(replace(kimi_k25.PUBLISHED, projector="multi_modal_projector."),),
    image_processors=(ProcessorReader(("KimiVL",), _DEFAULTS, build_processor, ranges=_RANGES),),
    videos=None,
    chat_template=template("kimi_vl", "<|im_user|> <|im_middle|> <|im_end|>"),
    complete=lambda model: None,
)
