"""Configurations and tables of CLIP, SigLIP (also Idefics3's and MiniCPM-V's) and InternViT vision towers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from megavlm.arch.layers import PATCH_EMBED, VISION_LAYER, VISION_NORM, vision_layers_run
from megavlm.config.schema import VisionConfig
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import QKV, Rename, Table, linear

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "swiglu",
}


def clip(settings: Settings, *, feature_layer: int) -> VisionConfig:
    """Return the tower of a CLIPVisionConfig. config.json omits settings that equal those of CLIP's base model."""
    return VisionConfig(
        **sizes(settings, layers=12, width=768, inner=3072, heads=12, image=224, patch=32),
        class_token=True,
        norm_epsilon=settings.get("layer_norm_eps", 1e-5),
        activation=_activation(settings, "quick_gelu"),
        patch_bias=False,
        pre_norm=True,
        post_norm=False,  # it applies to the class token alone, which is not a feature
        feature_layer=feature_layer,
    )


def siglip(settings: Settings, *, feature_layer: int, post_norm: bool) -> VisionConfig:
    """Return the tower of a SiglipVisionConfig."""
    return VisionConfig(
        **sizes(settings, layers=12, width=768, inner=3072, heads=12, image=224, patch=16),
        norm_epsilon=settings.get("layer_norm_eps", 1e-6),
        activation=_activation(settings, "gelu_pytorch_tanh"),
        post_norm=post_norm,
        feature_layer=feature_layer,
    )


def idefics3(settings: Settings) -> VisionConfig:
    """Return the tower of an Idefics3VisionConfig or SmolVLMVisionConfig: SigLIP with positions for any grid.

    Its tensors have SigLIP's names.
    """
    return VisionConfig(
        **sizes(settings, layers=12, width=1152, inner=3072, heads=16, image=224, patch=32),
        norm_epsilon=settings.get("layer_norm_eps", 1e-6),
        activation=_activation(settings, "gelu_pytorch_tanh"),
        position_interpolation="bucket",
    )


def minicpm(settings: Settings, *, merger_layer: int | None) -> VisionConfig:
    """Return the tower of a MiniCPMV4_6VisionConfig: SigLIP with positions for any grid and a merger inside.

    Its tensors have SigLIP's names, except for the merger's.
    """
    settings.require("hidden_act", "gelu_pytorch_tanh", why="the merger computes this one in any case")
    return VisionConfig(
        **sizes(settings, layers=12, width=768, inner=3072, heads=12, image=224, patch=16),
        norm_epsilon=settings.get("layer_norm_eps", 1e-6),
        activation="gelu_tanh",
        position_interpolation="fraction",
        merger_layer=merger_layer,
    )


def intern(settings: Settings, *, feature_layer: int) -> VisionConfig:
    """Return the tower of an InternVLVisionConfig: InternViT-300M (LayerNorm) or 6B (RMSNorm, q/k norm)."""
    norm: Literal["LayerNorm", "RMSNorm"] = (
        "RMSNorm" if settings.get("norm_type", "layer_norm") == "rms_norm" else "LayerNorm"
    )
    if not settings.get("use_absolute_position_embeddings", True):
        refuse(settings, "use_absolute_position_embeddings", "InternViT without learned positions is not known here")
    post_norm = feature_layer == -1 and not settings.get("use_mean_pooling", True)
    if post_norm and norm == "RMSNorm":
        refuse(settings, "use_mean_pooling", "a final LayerNorm after RMSNorm layers is not known here")
    return VisionConfig(
        **sizes(settings, layers=24, width=1024, inner=4096, heads=16, image=448, patch=14),
        class_token=True,
        normalization=norm,
        norm_epsilon=settings.get("layer_norm_eps", 1e-6),
        activation=_activation(settings, "gelu"),
        add_qkv_bias=settings.get("attention_bias", False),
        qk_norm="full" if settings.get("use_qk_norm", False) else "none",
        layer_scale=True,
        post_norm=post_norm,
        feature_layer=feature_layer,
    )


def sizes(
    settings: Settings, *, layers: int, width: int, inner: int, heads: int, image: int, patch: int
) -> dict[str, Any]:
    """Return the sizes whose setting names these towers share, with the given defaults of the configuration class.

    An image size that is no multiple of the patch size (384 pixels with patches of 14) is rounded down to one: 378.
    """
    side = settings.square("patch_size", patch)
    return {
        "num_layers": settings.get("num_hidden_layers", layers),
        "hidden_size": settings.get("hidden_size", width),
        "ffn_hidden_size": settings.get("intermediate_size", inner),
        "num_attention_heads": settings.get("num_attention_heads", heads),
        "image_size": settings.square("image_size", image) // side * side,
        "patch_size": side,
        "in_channels": settings.get("num_channels", 3),
    }


def _activation(settings: Settings, default: str) -> Any:
    return settings.choice("hidden_act", ACTIVATIONS, default)


def clip_table(vision: VisionConfig, prefix: str) -> Table:
    """Return the table of a CLIPVisionModel whose file names begin with `prefix`."""
    table = _embeddings(vision, f"{prefix}embeddings.")
    table["patch_embed.class_token"] = Rename(f"{prefix}embeddings.class_embedding")
    return table | linear("patch_embed.norm", f"{prefix}pre_layrnorm", bias=True) | _clip_layers(vision, prefix)


def siglip_table(vision: VisionConfig, prefix: str) -> Table:
    """Return the table of a SiglipVisionModel whose file names begin with `prefix`, without its pooling head."""
    table = _embeddings(vision, f"{prefix}embeddings.") | _clip_layers(vision, prefix)
    if vision.post_norm and vision.feature_layer == -1:
        table |= linear(VISION_NORM, f"{prefix}post_layernorm", bias=True)
    return table


def _embeddings(vision: VisionConfig, prefix: str) -> Table:
    table: Table = {f"{PATCH_EMBED}.proj.weight": Rename(f"{prefix}patch_embedding.weight", view=kernel(vision))}
    if vision.patch_bias:
        table[f"{PATCH_EMBED}.proj.bias"] = Rename(f"{prefix}patch_embedding.bias")
    if vision.position_embedding != "rope2d":
        table[f"{PATCH_EMBED}.position"] = Rename(f"{prefix}position_embedding.weight")
    return table


def kernel(vision: VisionConfig) -> tuple[int, ...]:
    """Return the shape of the patch convolution's weight: [H, C, p, p]."""
    return (vision.hidden_size, vision.in_channels, vision.patch_size, vision.patch_size)


def _clip_layers(vision: VisionConfig, prefix: str) -> Table:
    table: Table = {}
    for layer, hf_layer in blocks(vision, f"{prefix}encoder.layers."):
        table |= qkv(f"{layer}self_attention.linear_qkv", f"{hf_layer}self_attn.{{}}_proj", vision, bias=True)
        table |= linear(f"{layer}self_attention.linear_proj", f"{hf_layer}self_attn.out_proj", bias=True)
        table |= norms(vision, layer, f"{hf_layer}layer_norm1", f"{hf_layer}layer_norm2") | mlp(layer, hf_layer)
    return table


def blocks(vision: VisionConfig, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (module prefix, file prefix) of each vision layer that is run; file names of layers begin with `prefix`."""
    for number in range(vision_layers_run(vision)):
        yield f"{VISION_LAYER}{number}.", f"{prefix}{number}."


def norms(vision: VisionConfig, layer: str, before_attention: str, before_mlp: str) -> Table:
    """Return the table of a layer's two norms, with the given names in files."""
    bias = vision.normalization == "LayerNorm"
    first = linear(f"{layer}input_layernorm", before_attention, bias=bias)
    return first | linear(f"{layer}pre_mlp_layernorm", before_mlp, bias=bias)


def mlp(layer: str, hf_layer: str, names: tuple[str, str] = ("fc1", "fc2")) -> Table:
    """Return the table of a layer's MLP; `names` are the names of its linear layers in files."""
    first = linear(f"{layer}mlp.linear_fc1", f"{hf_layer}mlp.{names[0]}", bias=True)
    return first | linear(f"{layer}mlp.linear_fc2", f"{hf_layer}mlp.{names[1]}", bias=True)


def qkv(name: str, hf_pattern: str, vision: VisionConfig, *, bias: bool, order: tuple[int, ...] = ()) -> Table:
    """Return the table of query, key and value of a vision layer; `hf_pattern` has {} where q, k and v differ.

    `order` is that of `QKV`.
    """
    heads, width = vision.num_attention_heads, vision.hidden_size // vision.num_attention_heads
    return {
        f"{name}.{leaf}": QKV(f"{hf_pattern}.{leaf}", groups=heads, head_width=width, order=order)
        for leaf in (("weight", "bias") if bias else ("weight",))
    }


def intern_table(vision: VisionConfig, prefix: str, layers: str = "encoder.layer.") -> Table:
    """Return the table of an InternVLVisionModel below `prefix`; `layers` is the prefix of its layers."""
    embeddings, width = f"{prefix}embeddings.", vision.hidden_size
    side = vision.image_size // vision.patch_size
    table: Table = {
        "patch_embed.proj.weight": Rename(f"{embeddings}patch_embeddings.projection.weight", view=kernel(vision)),
        "patch_embed.proj.bias": Rename(f"{embeddings}patch_embeddings.projection.bias"),
        "patch_embed.class_token": Rename(f"{embeddings}cls_token", view=(1, 1, width)),
        "patch_embed.position": Rename(f"{embeddings}position_embeddings", view=(1, side * side + 1, width)),
    }
    for layer, hf_layer in blocks(vision, f"{prefix}{layers}"):
        attention = f"{hf_layer}attention."
        table |= qkv(f"{layer}self_attention.linear_qkv", f"{attention}{{}}_proj", vision, bias=vision.add_qkv_bias)
        table |= linear(f"{layer}self_attention.linear_proj", f"{attention}projection_layer", bias=True)
        if vision.qk_norm != "none":
            table |= linear(f"{layer}self_attention.q_layernorm", f"{attention}q_norm", bias=False)
            table |= linear(f"{layer}self_attention.k_layernorm", f"{attention}k_norm", bias=False)
        table |= norms(vision, layer, f"{hf_layer}layernorm_before", f"{hf_layer}layernorm_after")
        table |= mlp(layer, hf_layer)
        table[f"{layer}self_attn_bda.scale"] = Rename(f"{hf_layer}lambda_1")
        table[f"{layer}mlp_bda.scale"] = Rename(f"{hf_layer}lambda_2")
    if vision.post_norm:
        table |= linear(VISION_NORM, f"{prefix}layernorm", bias=True)
    return table
