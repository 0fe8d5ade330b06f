"""Parameters that one tensor-parallel rank holds of each named layer, exactly as `model/specs.py` builds them."""

from __future__ import annotations

from functools import lru_cache

from megavlm.arch.flops import head_width
from megavlm.arch.layers import (
    DEEPSTACK,
    EMBEDDING,
    LANGUAGE_LAYER,
    OUTPUT,
    PATCH_EMBED,
    PROJECTOR,
    VISION_LAYER,
    VISION_NORM,
)
from megavlm.config.derived import projector_width, query_groups, vocab_size
from megavlm.config.schema import LanguageConfig, ModelConfig, VisionConfig


@lru_cache(maxsize=65536)
def local_parameters(name: str, model: ModelConfig, tp: int) -> int:
    """Numbers in the parameters of a layer on one of `tp` ranks; padding for TP included, tied weights once each.

    OUTPUT of a tied model has its own copy only where it is in another chunk than EMBEDDING: add `vocabulary_shard`.
    """
    vision, language = model.vision, model.language
    if name.startswith(VISION_LAYER):
        return _vision_layer(vision, tp)
    if name.startswith(LANGUAGE_LAYER):
        return _language_layer(language, tp)
    if name == PATCH_EMBED:
        return _patch_embed(vision)
    if name == VISION_NORM:
        return _norm(vision) if vision.post_norm and vision.feature_layer == -1 else 0
    if name == PROJECTOR or name.startswith(DEEPSTACK):
        return _projector(model, tp, normed=name != PROJECTOR or model.projector.input_norm)
    if name == EMBEDDING:
        return vocabulary_shard(model, tp)
    if name == OUTPUT:
        return 0 if language.tie_embeddings else vocabulary_shard(model, tp)
    return language.hidden_size  # LANGUAGE_NORM


def vocabulary_shard(model: ModelConfig, tp: int) -> int:
    """One rank's rows of the embedding, whose number is rounded up to a multiple of TP."""
    return -(-vocab_size(model.language) // tp) * model.language.hidden_size


def _norm(vision: VisionConfig) -> int:
    return vision.hidden_size * (2 if vision.normalization == "LayerNorm" else 1)


def _vision_layer(vision: VisionConfig, tp: int) -> int:
    hidden, ffn, heads = vision.hidden_size, vision.ffn_hidden_size, vision.num_attention_heads
    width = hidden // heads
    local = -(-heads // tp) * width  # heads are padded to a multiple of TP
    gates = 2 if vision.activation == "swiglu" else 1
    weights = 4 * local * hidden + (gates + 1) * ffn // tp * hidden
    biases = 3 * local * vision.add_qkv_bias + (gates * ffn // tp + 2 * hidden) * vision.add_bias_linear
    norms = {"none": 0, "head": 2 * width, "full": 2 * heads * width}[vision.qk_norm] + 2 * _norm(vision)
    return weights + biases + norms + 2 * hidden * vision.layer_scale


def _language_layer(language: LanguageConfig, tp: int) -> int:
    hidden, width, heads = language.hidden_size, head_width(language), language.num_attention_heads
    qkv = (heads + 2 * query_groups(language)) * width // tp
    weights = (qkv + heads * width // tp + 3 * language.ffn_hidden_size // tp) * hidden
    return weights + qkv * language.add_qkv_bias + 2 * width * language.qk_norm + 2 * hidden


def _patch_embed(vision: VisionConfig) -> int:
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    rows = pixels + vision.patch_bias + vision.class_token
    if vision.position_embedding != "rope2d":
        rows += (vision.image_size // vision.patch_size) ** 2 + vision.class_token
    return rows * vision.hidden_size + _norm(vision) * vision.pre_norm


def _projector(model: ModelConfig, tp: int, *, normed: bool) -> int:
    projector, outputs = model.projector, model.language.hidden_size
    inputs = model.vision.hidden_size * projector.pixel_shuffle**2
    count = 2 * inputs * normed + outputs * (projector.anyres_max_tiles is not None)
    if projector.kind == "linear":
        return count + (inputs + projector.bias) * outputs // tp
    hidden = projector_width(model)
    return count + (inputs + projector.bias + outputs) * hidden // tp + outputs * projector.bias
