"""Table of functions that build and run each kind of layer. `megavlm/arch/kinds.py` is the torch-free half."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megavlm.arch.connector import connector_of
from megavlm.arch.kinds import for_every_kind, layer_kind
from megavlm.arch.layers import (
    AUDIO_EMBED,
    AUDIO_LAYER,
    AUDIO_PROJECTOR,
    DEEPSTACK,
    EMBEDDING,
    LANGUAGE_LAYER,
    LANGUAGE_NORM,
    MTP_INPUT,
    MTP_NORM,
    OUTPUT,
    PATCH_EMBED,
    PROJECTOR,
    VISION_LAYER,
    VISION_MERGER,
    VISION_NORM,
    is_merged,
    number_of,
)
from megavlm.arch.objectives import learned_scalars, objective_of
from megavlm.arch.workload import attends_in_windows
from megavlm.config.derived import attends_in_window, has_experts, is_linear, sequence_parallel
from megavlm.model import specs
from megavlm.model.audio import AudioEmbed, AudioProjector, merged_sounds
from megavlm.model.connector import Projector
from megavlm.model.context import MicroBatchContext
from megavlm.model.language import Embedding, Output, PredictionInput, Representation
from megavlm.model.layer_modules import cross_entropy_of, output_accumulation_fields
from megavlm.model.norm import Norm
from megavlm.model.rotary import Rotation
from megavlm.model.specs import LayerBuilder
from megavlm.model.vision import PatchEmbed, WindowMerger
from megavlm.precision.fp8_state import building

if TYPE_CHECKING:
    from megavlm.model.vlm import VLMChunk


@dataclass(frozen=True)
class LayerImpl:
    """Functions of a layer kind: `build(builder, name)` returns the module, `run(chunk, name, hidden, context)` the
    output.

    The shape of `hidden` follows from the kind's `reads` (`MicroBatchContext.hidden_shape`).
    """

    build: Callable[[LayerBuilder, str], nn.Module]
    run: Callable[[VLMChunk, str, Any, MicroBatchContext], Tensor]


def _build_audio_embed(builder: LayerBuilder, name: str) -> nn.Module:
    return AudioEmbed(builder)


def _build_audio_layer(builder: LayerBuilder, name: str) -> nn.Module:
    return specs.vision_layer(builder.config, builder.audio, builder.groups, name)


def _build_audio_projector(builder: LayerBuilder, name: str) -> nn.Module:
    return AudioProjector(builder)


def _build_vision_layer(builder: LayerBuilder, name: str) -> nn.Module:
    with building(name, builder.vision, builder.config):
        return specs.vision_layer(builder.config, builder.vision_layers, builder.groups, name)


def _build_language_layer(builder: LayerBuilder, name: str) -> nn.Module:
    with building(name, builder.language, builder.config):
        return specs.language_layer(builder.config, builder.language_layers, builder.groups, number_of(name))


def _build_vision_merger(builder: LayerBuilder, name: str) -> nn.Module:
    return WindowMerger(builder.config, builder.vision, builder.groups)


def _build_patch_embed(builder: LayerBuilder, name: str) -> nn.Module:
    return PatchEmbed(
        builder.config.model.vision,
        dtype=builder.vision.params_dtype,
        groups=builder.groups,
        sequence_parallel=sequence_parallel(builder.config),
    )


def _build_vision_norm(builder: LayerBuilder, name: str) -> nn.Module:
    vision = builder.config.model.vision
    if not layer_kind(name).is_present(builder.config.model):
        return nn.Identity()
    return Norm(builder.vision, vision.hidden_size, vision.norm_epsilon)


def _build_projector(builder: LayerBuilder, name: str) -> nn.Module:
    return connector_of(builder.config.model.projector).build(builder)


def _build_deepstack_merger(builder: LayerBuilder, name: str) -> nn.Module:
    return Projector(builder, norm_epsilon=builder.config.model.vision.norm_epsilon)


def _build_embedding(builder: LayerBuilder, name: str) -> nn.Module:
    scale = builder.config.model.language.embedding_scale
    return Embedding(builder.vocab_size, layer_config=builder.language, groups=builder.groups, scale=scale)


def _build_language_norm(builder: LayerBuilder, name: str) -> nn.Module:
    language, layer_config = builder.config.model.language, builder.language
    if not language.final_norm_1p:
        layer_config = replace(layer_config, layernorm_zero_centered_gamma=False)
    return Norm(layer_config, language.hidden_size, language.norm_epsilon, bias=False)


def _build_prediction_input(builder: LayerBuilder, name: str) -> nn.Module:
    return PredictionInput(builder.config.model.language, builder.language)


def _build_output(builder: LayerBuilder, name: str) -> nn.Module:
    model = builder.config.model
    if (objective := objective_of(model)).pools:
        learned = learned_scalars(model)
        return Representation(learned, scores=objective.scores, layer_config=builder.language, groups=builder.groups)
    own = not (model.language.tie_embeddings and builder.ties_locally)
    # The embedding adds to the gradient of a weight that it shares, through autograd.
    fused = output_accumulation_fields(builder.config) if own else {}
    return Output(
        builder.vocab_size,
        layer_config=replace(builder.language, **fused),
        groups=builder.groups,
        own_weight=own,
        cross_entropy=cross_entropy_of(builder.config),
        chunk=builder.config.execution.loss_chunk_tokens,
        softcap=model.language.final_softcap,
        scale=model.language.logit_scale,
    )


def _run_audio_embed(chunk: VLMChunk, name: str, hidden: Any, context: MicroBatchContext) -> Tensor:
    """Keep features of images as a state, if any, which passes by the audio encoder; return positions of sounds."""
    context.states.extend([] if hidden is None else [hidden])
    sounds = context.batch.sounds
    return chunk.parts[name](None if sounds is None else sounds.mels, context.sound_layout)


def _run_audio_layer(chunk: VLMChunk, name: str, hidden: Tensor, context: MicroBatchContext) -> Tensor:
    return chunk.run_transformer_layer(name, hidden, rotary=None, packing=context.sound_packing)


def _run_audio_projector(chunk: VLMChunk, name: str, hidden: Tensor, context: MicroBatchContext) -> Tensor:
    features = chunk.parts[name](hidden, context.sound_layout)
    return torch.cat([context.states.pop(), features]) if context.states else features


def _run_vision_layer(chunk: VLMChunk, name: str, hidden: Tensor, context: MicroBatchContext) -> Tensor:
    vision = context.config.model.vision
    packing = context.image_packing
    if attends_in_windows(vision, number_of(name)):
        packing = context.window_packing
    if is_merged(name, vision):
        packing = context.merged_packing
    return chunk.run_transformer_layer(name, hidden, rotary=context.vision_rope, packing=packing)


def _run_vision_merger(chunk: VLMChunk, name: str, hidden: Tensor, context: MicroBatchContext) -> Tensor:
    part, packing = chunk.parts[name], context.window_packing
    if chunk.full_recompute and hidden.requires_grad and chunk.training:
        return chunk.execution.recomputed(part, lambda x: part(x, packing), hidden)
    return part(hidden, packing)


def _run_language_layer(chunk: VLMChunk, name: str, hidden: Tensor, context: MicroBatchContext) -> Tensor:
    language, number = context.config.model.language, number_of(name)
    depth = number - language.num_layers
    if depth >= 0 and context.wants_logits:  # of the next token alone
        return hidden
    slides = attends_in_window(language, number)
    packing = context.sliding_packing if slides else context.language_packing
    rotary: Rotation | None = None
    if depth >= 0:
        rotary = context.further_rope(depth)
    elif number not in language.no_rope_layers:
        rotary = context.sliding_rope if slides else context.language_rope
    if is_linear(language, number):
        packing = context.linear_packing
    counts = torch.is_grad_enabled() and has_experts(context.config.model, number)
    routed = context.routed_rows if counts else None
    return chunk.run_transformer_layer(name, hidden, rotary=rotary, packing=packing, routed=routed)


def _run_patch_embed(chunk: VLMChunk, name: str, hidden: Any, context: MicroBatchContext) -> Tensor:
    images = context.batch.images
    assert images is not None, "the data loader gives every rank of the first vision stage its images"
    return chunk.parts[name](images.patches, context.layout)


def _run_norm(chunk: VLMChunk, name: str, hidden: Tensor, context: MicroBatchContext) -> Tensor:
    return chunk.parts[name](hidden)


def _run_projector(chunk: VLMChunk, name: str, hidden: Tensor, context: MicroBatchContext) -> Tensor:
    part, sharded = chunk.parts[name], sequence_parallel(context.config)

    def run(x: Tensor) -> Tensor:
        layout = context.layout_at(name)
        return part(x, layout, tile_groups=context.tile_groups, sequence_parallel=sharded)

    recomputes = layer_kind(name).is_recomputed(context.config.model)
    if recomputes and chunk.full_recompute and chunk.training and torch.is_grad_enabled():
        # Not megatron-core's checkpoint, which needs an input with a gradient: the tower may be frozen.
        return checkpoint(run, hidden, use_reentrant=False)
    return run(hidden)


def _run_embedding(chunk: VLMChunk, name: str, hidden: Tensor, context: MicroBatchContext) -> Tensor:
    part, text, features = chunk.parts[name], context.batch.text, context.batch.features
    if features is None:
        sounds = None
        if context.config.model.audio.num_layers:
            hidden, audio = hidden.tensor_split([len(hidden) - context.sound_layout.features])
            if (batch := context.batch.sounds) is not None and batch.dealt is not None:
                audio = context.exchanged(audio, batch.dealt)
            sounds = merged_sounds(batch, audio)
        embedded: Tensor = part(text, None if hidden is None else context.of_this_part(hidden), sounds)
    else:
        assert features.values is not None, "ranks with the embedding receive a colocated encoder's features"
        embedded = context.with_features_merged(part(text), features.values[:, 0])
    language = context.config.model.language
    if language.embedding_norm:
        embedded = F.rms_norm(embedded, embedded.shape[-1:], eps=language.norm_epsilon)
    context.states.extend([embedded] * (language.mtp_layers > 0))
    return embedded


def _run_prediction_input(chunk: VLMChunk, name: str, hidden: Tensor, context: MicroBatchContext) -> Tensor:
    depth, embedded = number_of(name), context.states[0]
    if depth == context.config.model.language.mtp_layers - 1:
        del context.states[0]
    context.states.append(hidden)
    return hidden if context.wants_logits else chunk.parts[name](context.followed(embedded, depth + 1), hidden)


def _run_prediction_norm(chunk: VLMChunk, name: str, hidden: Tensor, context: MicroBatchContext) -> Tensor:
    return hidden if context.wants_logits else chunk.parts[name](hidden)


def _run_output(chunk: VLMChunk, name: str, hidden: Tensor, context: MicroBatchContext) -> Tensor:
    part: Any = chunk.parts[name]
    text = context.batch.text
    if isinstance(part, Representation):
        return part(hidden, text)
    if not context.wants_logits:
        hidden = torch.cat([*context.states, hidden], dim=1) if context.states else hidden
        return part(hidden, text.labels, text.trained_positions, chunk.tied_weight, text.teacher)
    if context.top is not None:
        return part.statistics(hidden, text.labels, text.trained_positions, chunk.tied_weight, top=context.top)
    rows = context.batch.continuation
    return part.gather(part.logits(hidden, chunk.tied_weight, at=None if rows is None else rows.last))


IMPLEMENTATIONS: Mapping[str, LayerImpl] = for_every_kind(
    {
        AUDIO_EMBED: LayerImpl(_build_audio_embed, _run_audio_embed),
        AUDIO_LAYER: LayerImpl(_build_audio_layer, _run_audio_layer),
        AUDIO_PROJECTOR: LayerImpl(_build_audio_projector, _run_audio_projector),
        PATCH_EMBED: LayerImpl(_build_patch_embed, _run_patch_embed),
        VISION_LAYER: LayerImpl(_build_vision_layer, _run_vision_layer),
        VISION_MERGER: LayerImpl(_build_vision_merger, _run_vision_merger),
        DEEPSTACK: LayerImpl(_build_deepstack_merger, _run_projector),
        VISION_NORM: LayerImpl(_build_vision_norm, _run_norm),
        PROJECTOR: LayerImpl(_build_projector, _run_projector),
        EMBEDDING: LayerImpl(_build_embedding, _run_embedding),
        LANGUAGE_LAYER: LayerImpl(_build_language_layer, _run_language_layer),
        LANGUAGE_NORM: LayerImpl(_build_language_norm, _run_norm),
        MTP_INPUT: LayerImpl(_build_prediction_input, _run_prediction_input),
        MTP_NORM: LayerImpl(_build_language_norm, _run_prediction_norm),
        OUTPUT: LayerImpl(_build_output, _run_output),
    }
)
