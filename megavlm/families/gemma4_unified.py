"""Gemma 4 "unified" (12B): no tower, but embedded patches of 48 × 48 pixels, before Gemma 4's language model.

Its embedder of sounds is not trained, and exported unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.families import gemma4
from megavlm.families.shared.family import NamePrefixes
from megavlm.families.shared.language import language_table
from megavlm.families.shared.qwen_vl import with_defaults
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import ChannelsLast, Rename, Table, Transpose, linear

_TEXT: dict[str, Any] = {
    **{"sliding_window": 1024, "max_position_embeddings": 262144, "use_bidirectional_attention": "vision"},
    "hidden_size_per_layer_input": 0,
}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Gemma4UnifiedConfig."""
    if settings.values.get("vision_config") is None:
        refuse(settings, "vision_config", "a model without images is not known here")
    tower, text = settings.section("vision_config"), with_defaults(settings.section("text_config"), _TEXT)
    width, positions = tower.get("mm_embed_dim", 3840), tower.get("mm_posemb_size", 1120)
    tower.require("output_proj_dims", width, why="the projector reads what patches are embedded in")
    patch = tower.square("patch_size", 16) * tower.get("pooling_kernel_size", 3)
    return ModelConfig(
        vision=VisionConfig(
            num_layers=0,
            encoder_free=True,
            hidden_size=width,
            num_attention_heads=1,
            image_size=min(16, positions) * patch,  # typical: about the image processor's 280 features
            patch_size=patch,
            position_embedding="axes_rope2d",
            axis_positions=positions,
            pre_norm=True,
            norm_before_position=True,
        ),
        projector=ProjectorConfig(
            kind="linear",
            input_norm=True,
            normalization="UnitRMSNorm",
            norm_epsilon=tower.get("rms_norm_eps", 1e-6),
            bias=False,
        ),
        language=gemma4.language(text, tied=settings.get("tie_word_embeddings", True)),
        image_token=settings.get("image_token_id", 258880),
        video_token=settings.get("video_token_id", 258884),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    """Return a rule for each tensor of the model; files have the channels of a pixel last."""
    vision, embedder = model.vision, prefixes.vision
    found: Table = {
        "patch_embed.proj.weight": ChannelsLast(f"{embedder}patch_dense.weight", vision.in_channels),
        "patch_embed.proj.bias": Rename(f"{embedder}patch_dense.bias"),
        "patch_embed.position": Transpose(f"{embedder}pos_embedding"),
    }
    for leaf in ("weight", "bias"):
        norm = Transpose(f"{embedder}patch_ln1.{leaf}", columns=vision.in_channels)
        found |= {f"patch_embed.pixel_norm.{leaf}": norm}
    found |= linear("patch_embed.norm", f"{embedder}patch_ln2", bias=True)
    found |= linear("vision.norm", f"{embedder}pos_norm", bias=True)
    found |= linear("projector.linear_fc1", f"{prefixes.projector}embedding_projection", bias=False)
    return found | language_table(model, prefixes)


def complete(model: Any) -> None:
    """Give a Transformers model the masks of its `generate`, which are those of Gemma 4.

    Version 5.23 lets images attend both ways in all layers and beyond windows if `forward` makes the masks itself.
    """

    def with_masks(module: Any, args: Any, given: dict[str, Any]) -> Any:
        if not isinstance(given.get("attention_mask"), dict):
            known = {name: given.get(name) for name in ("attention_mask", "past_key_values", "position_ids")}
            kinds, embedded = given.get("mm_token_type_ids"), module.get_input_embeddings()(given["input_ids"])
            masks = model.create_masks_for_generate(model.config, embedded, **known, mm_token_type_ids=kinds)
            given = {**given, "attention_mask": masks}
        return args, given

    model.model.register_forward_pre_hook(with_masks, with_kwargs=True)  # PEFT does not call the model around it


FAMILY = replace(
    gemma4.FAMILY,
    name="gemma4_unified",
    model_types=("gemma4_unified",),
    config=config,
    table=table,
    name_prefixes=(NamePrefixes("model.vision_embedder.", "model.embed_vision.", "model.language_model."),),
    unused=(r"model\.embed_audio\..*",),
    complete=complete,
)
