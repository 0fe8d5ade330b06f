"""`VLMChunk`: the layers of one pipeline chunk as one module that the schedule runs.

A chunk sends one tensor to the next: packed vision tokens [V(/TP), 1, Hv] inside the tower, image features [F, 1, Hl]
after the projector, packed positions of sounds [A(/TP), 1, Ha] inside the audio encoder, hidden states [S(/TP), B, Hl]
after the embedding. If a cut lies between a DeepStack merger and the language layer that adds its features, the same
tensor also holds the features (`language.pack`). It also holds the features of images, within the audio encoder, and
the states for multi-token prediction (`language.PredictionInput`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint, make_viewless_tensor
from torch import Tensor, nn

from megavlm.arch.layers import (
    AUDIO_EMBED,
    AUDIO_LAYER,
    DEEPSTACK,
    EMBEDDING,
    LANGUAGE_LAYER,
    OUTPUT,
    VISION_LAYER,
    VISION_MERGER,
    carried_features,
    is_audio,
    kind_of,
    layer_names,
    states_before,
    tower_of,
    trained_below,
    trained_layers,
    trained_part,
    trains_weights,
)
from megavlm.arch.objectives import ties_output
from megavlm.arch.plan import Plan
from megavlm.backend.accelerator import profiler_range
from megavlm.config.derived import is_gated
from megavlm.config.lora_config import adapted_parts
from megavlm.config.schema import Config
from megavlm.inputs.batch import MicroBatch
from megavlm.model.context import MicroBatchContext
from megavlm.model.language import Representation, pack, unpack
from megavlm.model.layer_kinds import IMPLEMENTATIONS
from megavlm.model.layer_modules import execution_of
from megavlm.model.lora import add_adapters
from megavlm.model.offload import Offload
from megavlm.model.packing import Packing
from megavlm.model.rank_parts import laid_out, part_of_rank
from megavlm.model.rotary import Rotation
from megavlm.model.router import RoutedRows
from megavlm.model.specs import LayerBuilder
from megavlm.parallel.groups import Groups

TIED_KEY = f"{EMBEDDING}.word_embeddings.weight"


class HoldsWeights(Protocol):
    """A chunk whose weights can be set: whole on this rank, or already sharded over data-parallel ranks."""

    groups: Groups

    @property
    def device(self) -> torch.device:
        """Return the device that computes and communicates."""

    def shards(self) -> Iterator[ShardedTensor]:
        """Yield each slice of a parameter that this rank holds: name, global shape, offset, and a view of the data."""


class VLMChunk(MegatronModule):
    """Chunk `index` of the plan. `forward(batch)` returns the tensor for the next chunk, or in the last the losses."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        index: int,
        *,
        vocab_size: int,
        groups: Groups,
        pipeline: TransformerConfig,
        place: Callable[[nn.Module], object] = lambda part: None,
    ) -> None:
        """Build the layers. `place` moves each layer to its memory before the next one is built."""
        super().__init__(config=pipeline)
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = index // plan.dims.pp if plan.dims.vpp > 1 else None
        self.run_config = config
        self.groups = groups
        self.names = plan.chunks[index]
        trained = trained_layers(config)
        self.upstream_trained = plan.trained_before(index, trained)
        earlier = plan.before(index)
        # Features of images pass by the audio encoder, but for the tower all features pass by.
        self.hidden_trained = self.upstream_trained
        if kind_of(self.names[0]) != AUDIO_EMBED:
            self.hidden_trained = trained_below(self.names[0], earlier, trained)
        self.carried = carried_features(earlier)
        self.next_name = plan.chunks[index + 1][0] if index + 1 < len(plan.chunks) else None
        self.carried_on = carried_features([*earlier, *self.names])
        states = states_before(layer_names(config.model))
        self.states, self.states_on = states[len(earlier)], states[len(earlier) + len(self.names)]
        self.is_first = index == 0
        self.full_recompute = config.execution.recompute_granularity == "full"
        self.execution = execution_of(config, groups)
        self.input_tensor: Tensor | None = None
        builder = LayerBuilder(config, groups, vocab_size=vocab_size, ties_locally=EMBEDDING in self.names)
        self.parts: dict[str, nn.Module] = {}
        for name in self.names:
            part = IMPLEMENTATIONS[kind_of(name)].build(builder, name)
            self._choose_trained(name, part)
            place(part)
            self.parts[name] = part
            _attach(self, name, part)
        self.transformer_layers = [(n, part) for n, part in self.parts.items() if isinstance(part, TransformerLayer)]
        self.offload: Offload | None = None  # set by the builder of a rank's chunks, which share one
        self.has_tied_copy = ties_output(config.model) and (EMBEDDING in self.names) != (OUTPUT in self.names)
        if self.has_tied_copy:
            _mark_tied_copy(self.parts)

    def _choose_trained(self, name: str, part: nn.Module) -> None:
        """Freeze a layer's untrained weights. In a part of the model with adapters, these are all but the adapters."""
        config, module = self.run_config, trained_part(name)
        part.requires_grad_(trains_weights(name, config))
        if isinstance(part, Representation):  # scalars of the loss, which no option freezes
            part.requires_grad_(True)
        if module in adapted_parts(config) and isinstance(part, TransformerLayer):
            gated = module == "language" or is_gated(tower_of(name, config.model))
            add_adapters(part, name, config.lora, gated=gated)

    def transferred(self, batch: MicroBatch) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return the shapes of the tensors that this chunk receives and sends; None at the ends of the pipeline."""
        context = self._context(batch, device=batch.text.tokens.device)
        received = None if self.is_first else _shape_before(self.names[0], self.carried, self.states, context)
        if self.next_name is None:
            return received, None
        return received, _shape_before(self.next_name, self.carried_on, self.states_on, context)

    def _context(self, batch: MicroBatch, *, device: torch.device, **wants: Any) -> MicroBatchContext:
        return MicroBatchContext(batch, self.run_config, self.groups, device=device, **wants)

    def set_input_tensor(self, tensors: list[Tensor | None] | Tensor | None) -> None:
        """Store the tensor that the previous chunk sent; the schedule calls this before `forward`."""
        self.input_tensor = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self, batch: MicroBatch, *, logits: bool = False, top: int | None = None) -> Tensor:
        """Run this chunk's layers on a micro-batch.

        Returns:
            The hidden tensor for the next chunk; from the last chunk the cross entropies [B, S], the vectors and
            scalars of `Representation`, or with `logits=True` the logits [B, S, vocabulary] (whole on every
            tensor-parallel rank). With a continuation these are the logits of each row's last position,
            [B, 1, vocabulary]. With `top` it returns the statistics [B, S, 2 + 2·top] of `token_statistics`.
        """
        if self.offload is None or not torch.is_grad_enabled():
            return self._forward(batch, logits=logits, top=top)
        self.offload.begin_pass()
        output = self._forward(batch, logits=logits, top=top)
        self.offload.expect_backward(output)
        return output

    def _forward(self, batch: MicroBatch, *, logits: bool, top: int | None) -> Tensor:
        wants_logits = logits or top is not None
        context = self._context(batch, device=self.device, wants_logits=wants_logits, top=top)
        hidden, carried = self._received(context)
        names = self.names
        if not batch.text.tokens.numel():  # a colocated encoder runs on images or on sounds
            names = tuple(name for name in names if is_audio(name) == (batch.sounds is not None))
        with self.execution.chunk(self.transformer_layers):
            for name in names:
                output = self.run_layer(name, hidden, context)
                if kind_of(name) == DEEPSTACK:
                    carried.append(output)
                    continue
                hidden = output
                if carried and kind_of(name) == LANGUAGE_LAYER:
                    hidden = context.with_features(hidden, carried.pop(0))
        assert hidden is not None
        if OUTPUT in self.names:
            return hidden
        output = pack(hidden, [*carried, *context.states]).contiguous()
        return make_viewless_tensor(output, requires_grad=output.requires_grad, keep_graph=True)

    def run_layer(self, name: str, hidden: Any, context: MicroBatchContext) -> Tensor:
        """Return the output of one of the chunk's layers; `hidden` is None for the patch embedding."""
        with profiler_range(name):
            return IMPLEMENTATIONS[kind_of(name)].run(self, name, hidden, context)

    def run_transformer_layer(
        self,
        name: str,
        hidden: Tensor,
        *,
        rotary: Rotation | None,
        packing: Packing | None,
        routed: RoutedRows | None = None,
    ) -> Tensor:
        """Return the output of a transformer layer, with offloading or recomputation as configured.

        `routed` has the micro-batch's row counts, if the layer has experts and their load is counted.
        """
        layer: Any = self.parts[name]

        def run(x: Tensor) -> Tensor:
            if routed is not None:  # set here, as another micro-batch may run before a recomputation
                layer.mlp.router.rows = routed
            with self.execution.layer(name, layer):
                return layer(x, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=packing)[0]

        offloads = self.offload is not None and torch.is_grad_enabled()
        shared = (rotary, [span.mask for span in packing.masked] if packing is not None else [])
        with self.offload.layer(layer, *shared) if offloads else nullcontext():  # type: ignore[union-attr]
            # If the input needs no gradient, nothing before this layer is trained, and it is not recomputed.
            if self.full_recompute and hidden.requires_grad and self.training:
                return self.execution.recomputed(layer, run, hidden)
            return run(hidden)

    @property
    def tied_weight(self) -> Tensor | None:
        """Return the embedding's weight if the output layer of this chunk uses it in place of its own; else None."""
        if not ties_output(self.run_config.model) or self.has_tied_copy:
            return None
        return self.parts[EMBEDDING].word_embeddings.weight  # type: ignore[union-attr, return-value]

    def _received(self, context: MicroBatchContext) -> tuple[Any, list[Tensor]]:
        """Return hidden states and carried features from the previous chunk, detached if nothing before is trained.

        The schedule sends `input.grad` back in any case. Zeros set beforehand spare the backward pass
        through this chunk's frozen layers, and the previous chunk, which needs no gradient, ignores them.
        """
        tensor = self.input_tensor
        if tensor is None:
            features = context.batch.features
            values = None if features is None else features.values
            return None, [] if values is None else list(values.split(1, dim=1))[1:]
        if not self.upstream_trained and torch.is_grad_enabled():
            tensor.grad = torch.zeros_like(tensor)
            tensor = tensor.detach()
        shapes = [context.feature_shape] * self.carried + [context.passed_shape(self.names[0])] * self.states
        hidden, others = unpack(tensor, hidden=context.hidden_shape(self.names[0])[1:], carried=shapes)
        context.states.extend(others[self.carried :])
        return hidden if self.hidden_trained else hidden.detach(), others[: self.carried]

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load parameters by local name. Transformer Engine's extra state, a pickle, is never written or read."""
        extra = {
            f"{name}._extra_state": None
            for name, module in self.named_modules()
            if type(module).set_extra_state is not nn.Module.set_extra_state
        }
        return super().load_state_dict({**extra, **state_dict}, strict=strict, assign=assign)

    @property
    def device(self) -> torch.device:
        """Return the device that computes and communicates."""
        return next(self.parameters()).device

    def shards(self) -> Iterator[ShardedTensor]:
        """Yield each slice of a parameter that this rank holds, with a view of the data (`HoldsWeights`)."""
        for entry in self.sharded_state_dict().values():
            if isinstance(entry, ShardedTensorFactory):
                yield from entry.build()
            else:
                yield entry

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return parameters by global name, with their sharding, for checkpoints and initialisation."""
        metadata = {**(metadata or {}), "dp_cp_group": self.groups.dp_cp}
        state: dict[str, Any] = {}
        for name, part in self.parts.items():
            state |= sharded_state_dict_default(part, f"{prefix}{name}.", (), metadata, tp_group=self.groups.tp)
        state = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
        for key, entry in state.items():
            held = part_of_rank(entry.key, self.run_config.model, tp=self.groups.tp.size(), rank=self.groups.tp.rank())
            if held is not None:
                state[key] = laid_out(entry, held)
            elif is_padded_for_tp(entry.key):
                # Another TP pads to another size: what lies beyond the smaller one is padding, and zero.
                state[key] = replace(entry, allow_shape_mismatch=True)
        if self.has_tied_copy and OUTPUT in self.names:
            key = f"{prefix}{OUTPUT}.linear.weight"
            state[key] = make_tp_sharded_tensor_for_checkpoint(
                self.parts[OUTPUT].linear.weight,  # type: ignore[union-attr]
                f"{prefix}{TIED_KEY}",
                replica_id=(1, 0, self.groups.dp_cp.rank()),
                allow_shape_mismatch=True,
                tp_group=self.groups.tp,
                dp_cp_group=self.groups.dp_cp,
            )
        return state


def bare_chunk(chunk: Any) -> VLMChunk:
    """Return the chunk without its data-parallel wrapper, if it has one."""
    while not isinstance(chunk, VLMChunk):
        chunk = chunk.module
    return chunk


def _shape_before(name: str, carried: int, states: int, context: MicroBatchContext) -> tuple[int, ...]:
    """Return the shape of the tensor received before layer `name`, with `carried` DeepStack features and `states`
    packed into it.
    """
    hidden = context.hidden_shape(name)
    if not carried and not states:
        return hidden
    return prod(hidden) + carried * prod(context.feature_shape) + states * prod(context.passed_shape(name)), 1, 1


def is_padded_for_tp(key: str) -> bool:
    """Return whether a parameter may have TP padding at its end: vocabulary rows, vision heads."""
    if kind_of(key) in (AUDIO_LAYER, VISION_LAYER, VISION_MERGER):
        columns = (".self_attention.linear_proj.weight", ".self_attention.linear_proj.lora.o_proj.A")
        return ".self_attention.linear_qkv." in key or key.endswith(columns)
    return key in (TIED_KEY, f"{OUTPUT}.linear.weight")


def _attach(root: nn.Module, name: str, part: nn.Module) -> None:
    """Register a part under its dotted global name, so that parameter names are layout-free."""
    *path, leaf = name.split(".")
    for step in path:
        if not hasattr(root, step):
            root.add_module(step, nn.Module())
        root = getattr(root, step)
    root.add_module(leaf, part)


def _mark_tied_copy(parts: dict[str, nn.Module]) -> None:
    """Mark both copies of tied embeddings: same optimizer partition on both stages, counted once in the norm."""
    if EMBEDDING in parts:
        parts[EMBEDDING].word_embeddings.weight.shared_embedding = True  # type: ignore[union-attr]
    else:
        weight: Any = parts[OUTPUT].linear.weight  # type: ignore[union-attr]
        weight.shared_embedding = True
        weight.shared = True
