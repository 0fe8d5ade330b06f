"""PaliGemma 2: SigLIP, a linear projector and Gemma 2, with soft caps on attention scores and logits.

A sample is a prompt, whose tokens attend to each other in both directions, and a single answer, which is trained. The
prompt is plain text: images, then `<bos>`, the question and a line break.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavlm.config.schema import LanguageConfig, ModelConfig, ProjectorConfig
from megavlm.families import gemma3
from megavlm.families.shared.chat import template
from megavlm.families.shared.family import NESTED_TOWERS, Family, NamePrefixes, llava_prefixes
from megavlm.families.shared.inputs import Batch, Given, pixel_values
from megavlm.families.shared.language import language_table, types_of_layers
from megavlm.families.shared.qwen_vl import with_defaults
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import Table, linear
from megavlm.families.shared.vision import siglip, siglip_table
from megavlm.inputs.reader import HALF_PIXELS, ProcessorReader, build_whole

_VISION: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4096,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a PaliGemmaConfig with a Gemma2Config."""
    text = settings.section("text_config")
    text.require("model_type", "gemma2", why="PaliGemma 2 alone is known here")
    language = _language(text, tied=settings.get("tie_word_embeddings", True))
    if settings.get("projection_dim", 2048) != language.hidden_size:
        refuse(settings, "projection_dim", f"features must be as wide as the language model, {language.hidden_size}")
    return ModelConfig(
        vision=siglip(with_defaults(settings.section("vision_config"), _VISION), feature_layer=-1, post_norm=True),
        projector=ProjectorConfig(kind="linear", pixel_shuffle=1),
        language=language,
        image_token=settings.get("image_token_index", settings.get("image_token_id", 256000)),
    )


def _language(text: Settings, *, tied: bool) -> LanguageConfig:
    """Return the language model of a Gemma2Config."""
    text.require("use_bidirectional_attention", True, why="PaliGemma's prompts attend both ways")
    gemma = gemma3.gemma(text, tied=tied, vocabulary=256000, positions=8192)
    usual = ["full_attention" if number % 2 else "sliding_attention" for number in range(gemma.num_layers)]
    rope = text.section("rope_parameters")
    if rope.get("rope_type", "default") != "default":
        refuse(text, "rope_parameters", "positions of Gemma 2 are not scaled")
    return replace(
        gemma,
        rotary_base=float(rope.get("rope_theta", text.get("rope_theta", 1e4))),
        attention_softcap=_bound(text, "attn_logit_softcapping", 50.0),
        final_softcap=_bound(text, "final_logit_softcapping", 30.0),
        full_attention_layers=types_of_layers(text, usual, "full_attention", "sliding_attention"),
        bidirectional_prefix=True,
    )


def _bound(text: Settings, name: str, default: float) -> float | None:
    """Return a soft cap; None if the setting is null."""
    return None if text.values.get(name, default) is None else float(text.get(name, default))


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    return {
        **siglip_table(model.vision, prefixes.vision),
        **linear("projector.linear_fc1", f"{prefixes.projector}linear", bias=True),
        **language_table(model, prefixes),
    }


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return the model's inputs. token_type_ids are 0 for the tokens of prompts and 1 for others."""
    import torch

    types = torch.ones_like(batch.text.tokens)
    for first, count in batch.text.prefixes:
        types.view(-1)[first : first + count] = 0
    return {"input_ids": batch.text.tokens, "token_type_ids": types, **pixel_values(batch, model.vision)}


FAMILY = Family(
    name="paligemma",
    model_types=("paligemma",),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=llava_prefixes(*NESTED_TOWERS),
    unused=gemma3.FAMILY.unused,
    image_processors=(
        ProcessorReader(
            ("Siglip",),
            {**HALF_PIXELS, "size": {"height": 224, "width": 224}},
            build_whole,
            model_types=("paligemma",),
        ),
    ),
    chat_template=template("paligemma"),
)
