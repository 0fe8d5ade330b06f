"""Qianfan-OCR: InternVL's tower, projector and tiles before Qwen3, in files of InternVL's first format.

In training, Transformers leaves out branches of the tower's layers at random (`drop_path_rate`). Here all are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megavlm.arch.layers import LANGUAGE_LAYER, VISION_LAYER, VISION_NORM, vision_layers_run
from megavlm.config.schema import ModelConfig, VisionConfig
from megavlm.families import internvl
from megavlm.families.shared.chat import CHATML
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import tokens_and_pixels
from megavlm.families.shared.language import language_table
from megavlm.families.shared.qwen_vl import with_defaults
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import FusedQKV, Rename, Table, linear
from megavlm.families.shared.vision import kernel, qkv
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import Json

# Modules of a layer of the tower: the names here, in files, and in a model that Transformers has loaded.
_LINEAR = (
    ("self_attention.linear_proj", "attn.proj", "attention.projection_layer"),
    ("mlp.linear_fc1", "mlp.fc1", "mlp.fc1"),
    ("mlp.linear_fc2", "mlp.fc2", "mlp.fc2"),
)
_NORMS = (("input_layernorm", "norm1", "layernorm_before"), ("pre_mlp_layernorm", "norm2", "layernorm_after"))
_SCALES = (("self_attn_bda.scale", "ls1", "lambda_1"), ("mlp_bda.scale", "ls2", "lambda_2"))


@dataclass(frozen=True)
class _InFiles(NamePrefixes):
    """Names as in files; `inner` precedes layers of the language model, where Transformers 5.23 saves "encoder."."""

    inner: str = ""


def config(settings: Settings) -> ModelConfig:
    """QianfanOCRConfig."""
    tower = with_defaults(settings.section("vision_config"), {"attention_bias": True})
    tower.require("use_qk_norm", False, why="how files name the norms is not known here")
    text = with_defaults(settings.section("text_config"), {"model_type": "qwen3"})
    sections = {"vision_config": tower.values, "text_config": text.values}
    whole = with_defaults(settings, {"tie_word_embeddings": False})
    return internvl.config(Settings({**whole.values, **sections}, settings.where))


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    norm, first, last = ("0", "1", "3") if isinstance(prefixes, _InFiles) else ("layer_norm", "linear_1", "linear_2")
    return {
        **_tower_table(model.vision, prefixes),
        **linear("projector.norm", f"{prefixes.projector}{norm}", bias=True),
        **linear("projector.linear_fc1", f"{prefixes.projector}{first}", bias=True),
        **linear("projector.linear_fc2", f"{prefixes.projector}{last}", bias=True),
        **_language_table(model, prefixes),
    }


def _tower_table(vision: VisionConfig, prefixes: NamePrefixes) -> Table:
    files, prefix, width = isinstance(prefixes, _InFiles), prefixes.vision, vision.hidden_size
    patches = f"{prefix}embeddings.{'patch_embedding' if files else 'patch_embeddings.projection'}"
    token = f"{prefix}embeddings.{'class_embedding' if files else 'cls_token'}"
    positions = f"{prefix}embeddings.{'position_embedding' if files else 'position_embeddings'}"
    count = (vision.image_size // vision.patch_size) ** 2 + 1
    names: Table = {
        "patch_embed.proj.weight": Rename(f"{patches}.weight", view=kernel(vision)),
        "patch_embed.proj.bias": Rename(f"{patches}.bias"),
        "patch_embed.class_token": Rename(token, view=(1, 1, width)),
        "patch_embed.position": Rename(positions, view=(1, count, width)),
    }
    for number in range(vision_layers_run(vision)):
        layer, hf_layer = f"{VISION_LAYER}{number}.", f"{prefix}{'encoder.' if files else ''}layers.{number}."
        if files:
            for leaf in ("weight", "bias") if vision.add_qkv_bias else ("weight",):
                fused = FusedQKV(f"{hf_layer}attn.qkv.{leaf}", heads=vision.num_attention_heads)
                names[f"{layer}self_attention.linear_qkv.{leaf}"] = fused
        else:
            attention = f"{hf_layer}attention.{{}}_proj"
            names |= qkv(f"{layer}self_attention.linear_qkv", attention, vision, bias=vision.add_qkv_bias)
        for name, in_file, loaded in _LINEAR:
            names |= linear(f"{layer}{name}", f"{hf_layer}{in_file if files else loaded}", bias=True)
        for name, in_file, loaded in _NORMS:
            bias = vision.normalization == "LayerNorm"
            names |= linear(f"{layer}{name}", f"{hf_layer}{in_file if files else loaded}", bias=bias)
        for name, in_file, loaded in _SCALES:
            names[f"{layer}{name}"] = Rename(f"{hf_layer}{in_file if files else loaded}")
    return names | (linear(VISION_NORM, f"{prefix}layernorm", bias=True) if vision.post_norm else {})


def _language_table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    names = language_table(model, prefixes)
    if not isinstance(prefixes, _InFiles) or not prefixes.inner:
        return names
    nested = language_table(model, replace(prefixes, language=prefixes.language + prefixes.inner))
    return names | {name: rule for name, rule in nested.items() if name.startswith(LANGUAGE_LAYER)}


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return InternVL's processor; chat templates write `<image>` for an image."""
    return replace(internvl.build_processor(options, model, shared), placeholder="<image>")


_HEAD = "language_model.lm_head.weight"

FAMILY = Family(
    name="qianfan_ocr",
    model_types=("qianfan_ocr",),
    config=config,
    table=table,
    inputs=tokens_and_pixels,
    name_prefixes=(
        _InFiles("vision_model.", "mlp1.", "language_model.model.", _HEAD),
        _InFiles("vision_model.", "mlp1.", "language_model.model.", _HEAD, inner="encoder."),
        NamePrefixes("model.vision_tower.", "model.multi_modal_projector.", "model.language_model."),
    ),
    image_processors=(
        replace(internvl.FAMILY.image_processors[0], build=build_processor, model_types=("qianfan_ocr",)),
    ),
    image_text=internvl.IMAGE,
    chat_template=CHATML,
    unused=(
        r"(model\.vision_tower|vision_model\.encoder)\.layers\..*",
        r".*vision_(tower|model)\.layernorm\..*",
        r".*\.embeddings\.mask_token",
    ),
)
