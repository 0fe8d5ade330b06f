"""Gemma 3: SigLIP, average-pooled patches, sliding-window and full attention; image tokens attend both ways."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from megavlm.config.schema import LanguageConfig, ModelConfig, ProjectorConfig
from megavlm.errors import UserError
from megavlm.families.shared.chat import template
from megavlm.families.shared.family import NESTED_TOWERS, Family, NamePrefixes, llava_prefixes
from megavlm.families.shared.inputs import Batch, Given, pixel_values
from megavlm.families.shared.language import language_table
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import Rename, Table, Transpose
from megavlm.families.shared.vision import siglip, siglip_table
from megavlm.inputs.layout import Layout, Prompt
from megavlm.inputs.processor import Processor, Whole
from megavlm.inputs.reader import HALF_PIXELS, Json, ProcessorReader, sides

IMAGE, START, END = "<image_soft_token>", "<start_of_image>", "<end_of_image>"


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Gemma3Config."""
    tower = settings.section("vision_config")
    vision = siglip(tower, feature_layer=-1, post_norm=True)
    side, features = vision.image_size // vision.patch_size, math.isqrt(settings.get("mm_tokens_per_image", 256))
    if side % features:
        refuse(settings, "mm_tokens_per_image", f"{side} × {side} patches are no {features} × {features} equal blocks")
    return ModelConfig(
        vision=vision,
        projector=ProjectorConfig(
            kind="linear",
            pixel_shuffle=side // features,
            merge="average",
            input_norm=True,
            normalization="RMSNorm",
            norm_epsilon=vision.norm_epsilon,
            apply_layernorm_1p=True,
            bias=False,
        ),
        language=language(settings.section("text_config"), tied=settings.get("tie_word_embeddings", True)),
        image_token=settings.get("image_token_index", settings.get("image_token_id", 262144)),
    )


def language(text: Settings, *, tied: bool) -> LanguageConfig:
    """Return the language model of a Gemma3TextConfig."""
    text.require("attn_logit_softcapping", None, why="Gemma 3 has no soft caps")
    text.require("final_logit_softcapping", None, why="Gemma 3 has no soft caps")
    text.require("use_bidirectional_attention", False, why="text that attends to later text is not known here")
    layers = text.get("num_hidden_layers", 26)
    every = text.get("sliding_window_pattern", text.get("_sliding_window_pattern", 6))
    pattern = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    full = [layer for layer, kind in enumerate(text.get("layer_types", pattern)) if kind == "full_attention"]
    return replace(
        gemma(text, tied=tied, vocabulary=262208, positions=131072),
        qk_norm=True,
        full_attention_layers=tuple(full),
        bidirectional_images=True,
        **_rope(text),
    )


def gemma(text: Settings, *, tied: bool, vocabulary: int, positions: int) -> LanguageConfig:
    """Return a language model with the settings that Gemma 2 and Gemma 3 share.

    `vocabulary` and `positions` are defaults of the configuration class.
    """
    text.require("hidden_activation", "gelu_pytorch_tanh", why="only GeGLU language models are known here")
    text.require("attention_bias", False, why="biases in attention are not known here")
    if text.values.get("sliding_window", 4096) is None:  # null is not the default: Transformers fails on it
        refuse(text, "sliding_window", "Gemma needs a number of tokens, also if all layers are full_attention")
    width = text.get("hidden_size", 2304)
    return LanguageConfig(
        num_layers=text.get("num_hidden_layers", 26),
        hidden_size=width,
        ffn_hidden_size=text.get("intermediate_size", 9216),
        num_attention_heads=text.get("num_attention_heads", 8),
        num_query_groups=text.get("num_key_value_heads", 4),
        kv_channels=text.get("head_dim", 256),
        vocab_size=text.get("vocab_size", vocabulary),
        max_positions=text.get("max_position_embeddings", positions),
        norm_epsilon=text.get("rms_norm_eps", 1e-6),
        post_norms=True,
        apply_layernorm_1p=True,
        activation="geglu",
        softmax_scale=text.get("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=width**0.5,
        window_size=text.get("sliding_window", 4096),
        tie_embeddings=tied,
    )


def _rope(text: Settings) -> dict[str, Any]:
    """Return the rotary settings of full and sliding layers; Transformers 5 has one section for each type."""
    parameters = text.section("rope_parameters")
    everywhere, local = parameters.section("full_attention"), parameters.section("sliding_attention")
    scaling = Settings({**text.section("rope_scaling").values, **everywhere.values}, everywhere.where)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear") or local.get("rope_type", "default") != "default":
        refuse(text, "rope_parameters", "known rotary scalings of Gemma 3 are default and linear, in full attention")
    return {
        "rotary_base": float(everywhere.get("rope_theta", text.get("rope_theta", 1e6))),
        "local_rotary_base": float(local.get("rope_theta", text.get("rope_local_base_freq", 1e4))),
        "rope_scaling": "linear" if kind == "linear" else "none",
        "rope_scaling_factor": float(scaling.need("factor")) if kind == "linear" else 1.0,
    }


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    return {
        **siglip_table(model.vision, prefixes.vision),
        "projector.norm.weight": Rename(f"{prefixes.projector}mm_soft_emb_norm.weight"),
        "projector.linear_fc1.weight": Transpose(f"{prefixes.projector}mm_input_projection_weight"),
        **language_table(model, prefixes),
    }


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return the model's inputs. token_type_ids mark image tokens (1), which also attend to later image tokens."""
    assert model.image_token is not None
    types = batch.text.tokens.eq(model.image_token).long()
    return {"input_ids": batch.text.tokens, "token_type_ids": types, **pixel_values(batch, model.vision)}


@dataclass(frozen=True, kw_only=True)
class Framed(Whole):
    """Keeps an image in one piece, with a marker and empty lines before and after its tokens."""

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        found = super().layout(height, width, images=images)
        prompt = Prompt(self.image_token, (f"\n\n{START}", f"{END}\n\n"), (found.features,))
        return Layout(found.size, found.tiles, found.arrangement, prompt)


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    if options.get("do_pan_and_scan"):
        raise UserError("do_pan_and_scan in preprocessor_config.json is not supported: set it to false")
    return Framed(size=sides(options["size"], "size"), placeholder=START, image_token=IMAGE, **shared)


FAMILY = Family(
    name="gemma3",
    model_types=("gemma3",),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=llava_prefixes(*NESTED_TOWERS),
    unused=(r".*vision_tower\.(vision_model\.)?head\..*", r".*position_ids"),
    image_processors=(
        ProcessorReader(
            ("Gemma3",),
            {**HALF_PIXELS, "resample": 2, "size": {"height": 224, "width": 224}, "do_pan_and_scan": False},
            build_processor,
        ),
    ),
    image_text=IMAGE,
    chat_template=template("gemma", "<start_of_turn> <end_of_turn>"),
)
