"""Aya Vision: SigLIP, pixel shuffle with a norm and a SwiGLU MLP, and Command R7B (Cohere 2) or Command R (Cohere).

In a layer of Cohere's models attention and MLP share one norm (parallel block), and logits are scaled. In Cohere 2,
three of four layers have a sliding window and rotary embeddings; the others attend to all tokens without them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megavlm.config.schema import LanguageConfig, ModelConfig, ProjectorConfig
from megavlm.families import internvl
from megavlm.families.shared.chat import template
from megavlm.families.shared.family import NESTED_TOWERS, Family, NamePrefixes, llava_prefixes
from megavlm.families.shared.inputs import tokens_and_pixels
from megavlm.families.shared.language import language, language_table, types_of_layers
from megavlm.families.shared.qwen_vl import with_defaults
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import Grouped, Share, Table, linear
from megavlm.families.shared.vision import siglip, siglip_table
from megavlm.inputs.layout import Layout, Prompt
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import Json, sides

PATCH, START, END = "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"
_VISION: dict[str, Any] = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 14},
    **{"patch_size": 14, "image_size": 384},
}
_TEXT: dict[str, Any] = {
    **{"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40},
    **{"num_attention_heads": 64, "max_position_embeddings": 8192},
}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of an AyaVisionConfig."""
    tower = with_defaults(settings.section("vision_config"), _VISION)
    layer = settings.get("vision_feature_layer", -1)
    if not isinstance(layer, int):
        refuse(settings, "vision_feature_layer", "features of several layers are not known here")
    settings.require("vision_feature_select_strategy", "full", why="SigLIP has no class token to drop")
    if layer >= 0:  # layer 0 is the input of the first layer
        layer -= tower.need("num_hidden_layers") + 1
    model = model_config(settings, tower, feature_layer=layer, post_norm=False)
    epsilon = settings.get("adapter_layer_norm_eps", 1e-6)
    return replace(model, projector=replace(model.projector, input_norm=True, norm_epsilon=epsilon))


def model_config(settings: Settings, tower: Settings, *, feature_layer: int, post_norm: bool) -> ModelConfig:
    """Return the `ModelConfig` of an Aya Vision or Cohere 2 Vision model, with a projector without a norm."""
    tower.require("model_type", "siglip_vision_model", why="only SigLIP towers are known here")
    text = _language(settings.section("text_config"), tied=settings.get("tie_word_embeddings", True))
    inner = settings.get("alignment_intermediate_size", text.hidden_size)
    if inner % 2:
        refuse(settings, "alignment_intermediate_size", "half of it is the gate")
    return ModelConfig(
        vision=siglip(tower, feature_layer=feature_layer, post_norm=post_norm),
        projector=ProjectorConfig(
            kind="swiglu", hidden_size=inner // 2, pixel_shuffle=settings.get("downsample_factor", 2)
        ),
        language=text,
        image_token=settings.get("image_token_index", settings.get("image_token_id", 255036)),
    )


def _language(text: Settings, *, tied: bool) -> LanguageConfig:
    """Return the language model of a Cohere2Config or CohereConfig."""
    kind = text.get("model_type", "cohere2")
    if kind not in ("cohere", "cohere2"):
        refuse(text, "model_type", "known language models are cohere and cohere2")
    text.require("use_qk_norm", False, why="norms with a weight for each head are not known here")
    base = {"cohere": 5e5, "cohere2": 1e4}[kind]
    # Heads divide the hidden size. The window applies to some layers only, so it does not limit the sequence length.
    alone = {**with_defaults(text, {**_TEXT, "rope_theta": base}).values, "head_dim": None, "sliding_window": None}
    model = replace(
        language(Settings(alone, text.where), kind="llama", tied=tied),
        norm_epsilon=text.get("layer_norm_eps", 1e-5),
        normalization="LayerNorm",
        parallel_block=True,
        rotary_interleaved=True,
        logit_scale=float(text.get("logit_scale", 0.0625)),
    )
    if kind == "cohere":
        return model
    if text.values.get("sliding_window", 4096) is None:
        refuse(text, "sliding_window", "Cohere 2 needs a number of tokens")
    every = text.get("sliding_window_pattern", 4)
    usual = ["sliding_attention" if (number + 1) % every else "full_attention" for number in range(model.num_layers)]
    full = types_of_layers(text, usual, "full_attention", "sliding_attention")
    window = text.get("sliding_window", 4096)
    return replace(model, window_size=window, full_attention_layers=full, no_rope_layers=full)


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    """Return the table of the model. In files, the projector's gate rows are below the rows that they multiply."""
    projector, rows = prefixes.projector, model.projector.hidden_size
    names: Table = {**siglip_table(model.vision, prefixes.vision), **language_table(model, prefixes)}
    for leaf in ("weight", "bias"):
        name = f"{projector}linear_1.{leaf}"
        names[f"projector.linear_fc1.{leaf}"] = Grouped((Share(name, rows, rows), Share(name, rows)), groups=1)
    if model.projector.input_norm:
        names |= linear("projector.norm", f"{projector}layernorm", bias=True)
    return names | linear("projector.linear_fc2", f"{projector}linear_2", bias=True)


def complete(model: Any) -> None:
    """Scale the logits of a Transformers model; version 5.23 omits logit_scale if Cohere's model is part of another."""
    if not hasattr(model, "logit_scale"):
        scale = model.config.text_config.logit_scale
        model.lm_head.register_forward_hook(lambda head, given, logits: logits * scale)


@dataclass(frozen=True, kw_only=True)
class NumberedTiles(internvl.DynamicTiles):
    """Cuts an image into tiles as InternVL does, and writes the number of each tile before the tile."""

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        found = super().layout(height, width, images=images)
        count = len(found.tiles)
        names = (*(f"TILE_{number}" for number in range(1, count)), "TILE_GLOBAL")
        prompt = Prompt(self.image_token, (START + names[0], *names[1:], END), (found.features // count,) * count)
        return replace(found, prompt=prompt)


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor. It always cuts, whatever `crop_to_patches` in the file is."""
    tile, fewest, most = sides(options["size"], "size"), options["min_patches"], options["max_patches"]
    return NumberedTiles(tile=tile, fewest=fewest, most=most, image_token=PATCH, **shared)


FAMILY = Family(
    name="aya_vision",
    model_types=("aya_vision",),
    config=config,
    table=table,
    inputs=tokens_and_pixels,
    name_prefixes=llava_prefixes(*NESTED_TOWERS),
    unused=(r".*vision_tower\..*",),
    image_processors=(
        replace(internvl.FAMILY.image_processors[0], build=build_processor, model_types=("aya_vision",)),
    ),
    image_text=PATCH,
    chat_template=template("cohere", "<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|CHATBOT_TOKEN|> <|USER_TOKEN|>"),
    complete=complete,
)
