"""Qianfan-OCR: InternVL's tower, projector and tiles with Qwen3, in files with InternVL's original tensor names.

Transformers drops branches of the tower's layers at random in training (`drop_path_rate`); all are computed here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megavlm.arch.layers import LANGUAGE_LAYER
from megavlm.config.schema import ModelConfig, VisionConfig
from megavlm.families import internvl, llava
from megavlm.families.shared.chat import CHATML
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import tokens_and_pixels
from megavlm.families.shared.language import language_table
from megavlm.families.shared.qwen_vl import with_defaults
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import QKV, FusedQKV, Rename, Table, linear
from megavlm.families.shared.vision import intern_table
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import Json

# Parts of the tower's tensor names: in a model loaded by Transformers → in files.
_STORED = {
    "patch_embeddings.projection": "patch_embedding",
    "cls_token": "class_embedding",
    "position_embeddings": "position_embedding",
    "attention.q_proj": "attn.qkv",
    "attention.projection_layer": "attn.proj",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "lambda_": "ls",
}


@dataclass(frozen=True)
class _InFiles(NamePrefixes):
    """Names as in files. `inner` precedes layers of the language model ("encoder." in files of Transformers 5.23)."""

    inner: str = ""


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a QianfanOCRConfig."""
    tower = with_defaults(settings.section("vision_config"), {"attention_bias": True})
    tower.require("use_qk_norm", False, why="how files name the norms is not known here")
    text = with_defaults(settings.section("text_config"), {"model_type": "qwen3"})
    sections = {"vision_config": tower.values, "text_config": text.values}
    whole = with_defaults(settings, {"tie_word_embeddings": False})
    return internvl.config(Settings({**whole.values, **sections}, settings.where))


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    vision, norm = model.vision, "layer_norm"
    if isinstance(prefixes, _InFiles):
        norm = "0"
        names = llava.whole_table(_stored_tower(vision, prefixes.vision), model, prefixes, ("1", "3"))
        nested = language_table(model, replace(prefixes, language=prefixes.language + prefixes.inner))
        names |= {name: rule for name, rule in nested.items() if name.startswith(LANGUAGE_LAYER)}
    else:
        names = llava.whole_table(intern_table(vision, prefixes.vision, "layers."), model, prefixes)
    return names | linear("projector.norm", f"{prefixes.projector}{norm}", bias=True)


def _stored_tower(vision: VisionConfig, prefix: str) -> Table:
    """Return the table of the tower as stored in files, where a layer's queries, keys and values are one tensor."""
    names: Table = {}
    for name, rule in intern_table(vision, prefix, "encoder.layers.").items():
        hf_name = rule.hf_names[0]
        for loaded, stored in _STORED.items():
            hf_name = hf_name.replace(loaded, stored)
        fused = isinstance(rule, QKV)
        view = None if fused else getattr(rule, "view", None)
        names[name] = FusedQKV(hf_name, heads=vision.num_attention_heads) if fused else Rename(hf_name, view)
    return names


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return InternVL's image processor with `<image>` as the placeholder of chat templates."""
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
