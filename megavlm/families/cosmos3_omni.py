"""Cosmos 3's reasoner: the parts of Qwen3-VL, in a checkpoint that also generates images, videos, sound and actions.

Only the reasoner is trained, because Transformers loads only it; the generators' weights are exported unchanged.
File names have no prefixes: layers of the language model are `layers.*`, layers of the tower `blocks.*`. Newer files
use Diffusers' names for the attention matrices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megavlm.arch.layers import LANGUAGE_LAYER
from megavlm.config.schema import ModelConfig
from megavlm.families import qwen3_vl
from megavlm.families.shared.family import NamePrefixes
from megavlm.families.shared.qwen_vl import PREFIXES
from megavlm.families.shared.table import QKV, Table, linear

# Weights of the generators: their part of each layer, and their input and output projections.
_GENERATORS = (
    r".*\.(add_[qkv]_proj|to_add_out|norm_added_[qk])\..*",
    r".*moe_gen.*",
    r"(proj_in|proj_out|time_embedder)\..*",
    r"(audio|action)_(proj_in|proj_out)\..*",
    r"(audio|action)_modality_embed",
)


@dataclass(frozen=True)
class _AsDiffusers(NamePrefixes):
    """Names without prefixes, with Diffusers' names for attention in the language model."""


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    names = qwen3_vl.table(model, prefixes)
    return {**names, **_attention(model)} if isinstance(prefixes, _AsDiffusers) else names


def _attention(model: ModelConfig) -> Table:
    groups, width = model.language.num_query_groups, model.language.kv_channels
    names: Table = {}
    for number in range(model.language.num_layers):
        layer, hf_layer = f"{LANGUAGE_LAYER}{number}.self_attention.", f"layers.{number}.self_attn."
        names[f"{layer}linear_qkv.weight"] = QKV(f"{hf_layer}to_{{}}.weight", groups=groups, head_width=width)
        names |= linear(f"{layer}q_layernorm", f"{hf_layer}norm_q", bias=False)
        names |= linear(f"{layer}k_layernorm", f"{hf_layer}norm_k", bias=False)
        names |= linear(f"{layer}linear_proj", f"{hf_layer}to_out", bias=False)
    return names


FAMILY = replace(
    qwen3_vl.FAMILY,
    name="cosmos3_omni",
    model_types=("cosmos3_omni",),
    table=table,
    name_prefixes=(PREFIXES[0], _AsDiffusers(), NamePrefixes()),
    unused=_GENERATORS,
)
