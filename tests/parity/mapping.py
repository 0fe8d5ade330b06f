"""From the names and shapes of Transformers to ours: weights and, as the map is linear, gradients alike.

megatron-core fuses query, key and value per key/value head: its query heads, then the key, then the value. A gated
MLP's first layer is [gate; up]. A patch convolution is a linear layer over flattened patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megavlm.planner.layers import LANGUAGE_LAYER, VISION_LAYER

Tensors = Mapping[str, Tensor]


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class End:
    """A tensor outside the layers: our name, theirs, and how it becomes our shape."""

    ours: str
    theirs: str
    reshape: Callable[[Tensor], Tensor] = _same


@dataclass(frozen=True)
class Family:
    """Where an architecture of Transformers keeps what we name otherwise. Tensors it lacks (biases) are left out."""

    ours: str  # prefix of our layers
    layer: str  # prefix of theirs, with {} for the number
    qkv: tuple[str, str, str]
    linears: Mapping[str, tuple[str, ...]]  # our module → theirs, concatenated by rows
    ends: tuple[End, ...]
    scales: Mapping[str, str] = field(default_factory=dict)  # our bare parameter → theirs

    def to_ours(self, tensors: Tensors, *, layers: int, groups: int, prefix: str = "") -> dict[str, Tensor]:
        """Our tensors of the first `layers` layers and of both ends; `prefix` precedes all of their names."""
        found = {
            end.ours: end.reshape(tensors[prefix + end.theirs]) for end in self.ends if prefix + end.theirs in tensors
        }
        for number in range(layers):
            theirs, ours = prefix + self.layer.format(number), f"{self.ours}{number}."
            for leaf in ("weight", "bias"):
                parts = _present(tensors, [f"{theirs}{name}.{leaf}" for name in self.qkv])
                if parts:
                    found[f"{ours}self_attention.linear_qkv.{leaf}"] = interleave(*parts, groups=groups)
                for module, names in self.linears.items():
                    parts = _present(tensors, [f"{theirs}{name}.{leaf}" for name in names])
                    if parts:
                        found[f"{ours}{module}.{leaf}"] = torch.cat(parts)
            for scale, name in self.scales.items():
                found[ours + scale] = tensors[theirs + name]
        return found


def interleave(query: Tensor, key: Tensor, value: Tensor, *, groups: int) -> Tensor:
    """[heads·D, …], [groups·D, …] twice → per group (heads/groups + 2)·D rows."""
    parts = [part.unflatten(0, (groups, -1)) for part in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _present(tensors: Tensors, names: list[str]) -> list[Tensor]:
    found = [tensors[name] for name in names if name in tensors]
    assert len(found) in (0, len(names)), f"only some of {names} exist"
    return found


_CLIP_LINEARS = {
    "self_attention.linear_proj": ("self_attn.out_proj",),
    "mlp.linear_fc1": ("mlp.fc1",),
    "mlp.linear_fc2": ("mlp.fc2",),
    "input_layernorm": ("layer_norm1",),
    "pre_mlp_layernorm": ("layer_norm2",),
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _flat(tensor: Tensor) -> Tensor:
    return tensor.flatten(1)


CLIP = Family(
    ours=VISION_LAYER,
    layer="encoder.layers.{}.",
    qkv=_QKV,
    linears=_CLIP_LINEARS,
    ends=(
        End("patch_embed.proj.weight", "embeddings.patch_embedding.weight", _flat),
        End("patch_embed.class_token", "embeddings.class_embedding"),
        End("patch_embed.position", "embeddings.position_embedding.weight"),
        End("patch_embed.norm.weight", "pre_layrnorm.weight"),
        End("patch_embed.norm.bias", "pre_layrnorm.bias"),
    ),
)
SIGLIP = Family(
    ours=VISION_LAYER,
    layer="encoder.layers.{}.",
    qkv=_QKV,
    linears=_CLIP_LINEARS,
    ends=(
        End("patch_embed.proj.weight", "embeddings.patch_embedding.weight", _flat),
        End("patch_embed.proj.bias", "embeddings.patch_embedding.bias"),
        End("patch_embed.position", "embeddings.position_embedding.weight"),
        End("vision.norm.weight", "post_layernorm.weight"),
        End("vision.norm.bias", "post_layernorm.bias"),
    ),
)
INTERN = Family(
    ours=VISION_LAYER,
    layer="encoder.layer.{}.",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    linears={
        "self_attention.linear_proj": ("attention.projection_layer",),
        "self_attention.q_layernorm": ("attention.q_norm",),
        "self_attention.k_layernorm": ("attention.k_norm",),
        "mlp.linear_fc1": ("mlp.fc1",),
        "mlp.linear_fc2": ("mlp.fc2",),
        "input_layernorm": ("layernorm_before",),
        "pre_mlp_layernorm": ("layernorm_after",),
    },
    scales={"self_attn_bda.scale": "lambda_1", "mlp_bda.scale": "lambda_2"},
    ends=(
        End("patch_embed.proj.weight", "embeddings.patch_embeddings.projection.weight", _flat),
        End("patch_embed.proj.bias", "embeddings.patch_embeddings.projection.bias"),
        End("patch_embed.class_token", "embeddings.cls_token", torch.flatten),
        End("patch_embed.position", "embeddings.position_embeddings", torch.squeeze),
        End("vision.norm.weight", "layernorm.weight"),
        End("vision.norm.bias", "layernorm.bias"),
    ),
)
LLAMA = Family(  # and Qwen2, Qwen3
    ours=LANGUAGE_LAYER,
    layer="layers.{}.",
    qkv=_QKV,
    linears={
        "self_attention.linear_proj": ("self_attn.o_proj",),
        "self_attention.q_layernorm": ("self_attn.q_norm",),
        "self_attention.k_layernorm": ("self_attn.k_norm",),
        "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.linear_fc2": ("mlp.down_proj",),
        "input_layernorm": ("input_layernorm",),
        "pre_mlp_layernorm": ("post_attention_layernorm",),
    },
    ends=(
        End("embedding.word_embeddings.weight", "embed_tokens.weight"),
        End("language.norm.weight", "norm.weight"),
    ),
)
PROJECTORS = {
    "projector.norm": "layer_norm",
    "projector.linear_fc1": "linear_1",
    "projector.linear_fc2": "linear_2",
}


def whole_to_ours(
    tensors: Tensors, tower: Family, *, vision_layers: int, vision_heads: int, language_layers: int, groups: int
) -> dict[str, Tensor]:
    """A LLaVA-like model of Transformers (`model.vision_tower`, `.multi_modal_projector`, `.language_model`)."""
    found = tower.to_ours(tensors, layers=vision_layers, groups=vision_heads, prefix="model.vision_tower.")
    for ours, theirs in PROJECTORS.items():
        for leaf in ("weight", "bias"):
            name = f"model.multi_modal_projector.{theirs}.{leaf}"
            if name in tensors:
                found[f"{ours}.{leaf}"] = tensors[name]
    found |= LLAMA.to_ours(tensors, layers=language_layers, groups=groups, prefix="model.language_model.")
    if "lm_head.weight" in tensors:
        found["output.linear.weight"] = tensors["lm_head.weight"]
    return found
