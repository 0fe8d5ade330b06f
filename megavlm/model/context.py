"""Sequence bounds, masks, rotary angles and shapes of a micro-batch, for the layers of a chunk."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor

from megavlm.arch.dims import RowSplit
from megavlm.arch.image_tokens import TileGroup, smallest_grid, tokens_per_grid, tokens_per_image
from megavlm.arch.kind import Stream
from megavlm.arch.kinds import layer_kind
from megavlm.arch.layers import AUDIO_EMBED, is_merged
from megavlm.arch.workload import window_patches
from megavlm.config.derived import (
    attends_both_ways,
    masks_all_layers,
    sequence_multiple,
    sequence_parallel,
    tower_merge,
    unwindowed,
)
from megavlm.config.lora_config import clipped_parts
from megavlm.config.schema import Config, LanguageConfig, VisionConfig
from megavlm.data.context_parts import followers, order_of
from megavlm.inputs.batch import Continuation, DealtImages, MicroBatch
from megavlm.model.audio import SoundLayout
from megavlm.model.context_attention import causal_spans
from megavlm.model.delta_rule import Sequences
from megavlm.model.language import add_features
from megavlm.model.masks import CachedAttention, image_runs, masked_spans, prefix_runs
from megavlm.model.packing import Packing, packed
from megavlm.model.rotary import Rotation, rope, rotation
from megavlm.model.router import RoutedRows
from megavlm.model.specs import DTYPES
from megavlm.model.vision import VisionLayout, rope2d
from megavlm.parallel.groups import Groups


@dataclass(frozen=True)
class MicroBatchContext:
    """Layouts, packings, rotary angles and shapes of a micro-batch, computed once per chunk when a layer reads them."""

    batch: MicroBatch
    config: Config
    groups: Groups
    device: torch.device
    wants_logits: bool = False  # whether the output layer returns logits instead of the loss
    top: int | None = None  # the output layer returns `token_statistics` with so many likeliest tokens
    # What chunks pass on in addition to hidden states (`states_before`): the features of images, then inputs of
    # multi-token prediction (`passed_shape`)
    states: list[Tensor] = field(default_factory=list)

    @cached_property
    def sound_layout(self) -> SoundLayout:
        """Return the layout of the packed positions of sounds."""
        multiple = sequence_multiple("audio", self.config, tp=self.groups.dims.tp)
        return SoundLayout.of(self.batch.sounds, self.config.model.audio, multiple=multiple)

    @cached_property
    def sound_packing(self) -> Packing:
        """Return the sequences of audio layers, which are windows of sounds."""
        return packed(self.sound_layout.bounds, self.device, usual=self.sound_layout.usual)

    @cached_property
    def layout(self) -> VisionLayout:
        """Return the layout of the packed vision sequence."""
        model = self.config.model
        multiple = sequence_multiple("vision", self.config, tp=self.groups.dims.tp) * tower_merge(model.vision) ** 2
        return VisionLayout.of(
            self.batch.image_sizes.grids,
            class_token=model.vision.class_token,
            multiple=multiple,
            blank=smallest_grid(model.projector),
            window=window_patches(model),
        )

    @cached_property
    def merged_layout(self) -> VisionLayout:
        """Return the layout after the tower's merger."""
        return self.layout.merged()

    def layout_at(self, name: str) -> VisionLayout:
        """Return the layout of the vision sequence that layer `name` reads."""
        return self.merged_layout if is_merged(name, self.config.model.vision) else self.layout

    @cached_property
    def image_packing(self) -> Packing:
        """Return the sequences of vision layers that attend over whole images."""
        vision = self.config.model.vision
        # Blocks that are merged later have one size, so that each image's blocks are consecutive without reordering.
        order = self.layout.image_order(self.device) if vision.merger_layer is None else None
        return packed(
            self.layout.bounds,
            self.device,
            usual=_usual_length(vision),
            order=order,
            padding=self._padding(self.layout),
        )

    @cached_property
    def merged_packing(self) -> Packing:
        """Return the sequences of vision layers after the tower's merger."""
        vision, layout = self.config.model.vision, self.merged_layout
        usual = _usual_length(vision) // tower_merge(vision) ** 2
        return packed(layout.bounds, self.device, usual=usual, padding=self._padding(layout))

    @cached_property
    def window_packing(self) -> Packing:
        """Return the sequences of vision layers that attend inside windows."""
        layout = self.layout
        return packed(layout.window_bounds, self.device, usual=layout.window**2, padding=self._padding(layout))

    @cached_property
    def language_packing(self) -> Packing | None:
        """Return the packing of language layers without a window; None if each row is one causal sequence."""
        if self.batch.continuation is not None:
            return self._cached(self.batch.continuation, window=None)
        if masks_all_layers(self.config.model.language):
            return self._masked_packing(window=None)
        context = self.groups.context
        if self.batch.context is not None and context.split.groups > 1:
            rows, group = self.batch.row_tokens.shape[0], context.keys.rank()
            spans = causal_spans(self._bounds, rows=rows, split=context.split, group=group)
            return packed(self._bounds, self.device, causal=spans, padding=self._text_padding)
        if self.batch.text.cu_seqlens is None and self._text_padding is None:
            return None
        return packed(self._bounds, self.device, padding=self._text_padding)

    @cached_property
    def linear_packing(self) -> Packing:
        """Return the sequences of layers with linear attention: of whole rows, even if ranks shard rows."""
        if self.batch.continuation is not None:
            return self._cached(self.batch.continuation, window=None)
        return Packing(sequences=Sequences(tuple(sorted({*self._bounds})), self.device))

    @cached_property
    def sliding_packing(self) -> Packing:
        """Return the sequences and masks of layers with a sliding window."""
        window = self.config.model.language.window_size
        if self.batch.continuation is not None:
            return self._cached(self.batch.continuation, window=window)
        return self._masked_packing(window=window)

    def _masked_packing(self, *, window: int | None) -> Packing:
        """Return the sequences and masks of layers with a window of `window` tokens (None: without)."""
        spans = masked_spans(
            self._bounds,
            window=window,
            runs=self._runs_within(window),
            longest=max(self._run_lengths),
            beyond=self.config.model.language.bidirectional_prefix,
            device=self.device,
            dtype=DTYPES[self.config.precision.dtype],
        )
        return packed(self._bounds, self.device, masked=spans, padding=self._text_padding)

    def _cached(self, rows: Continuation, *, window: int | None) -> Packing:
        """Return the packing of attention to a key/value cache, with a window of `window` tokens (None: without)."""
        samples, length = self.batch.text.tokens.shape
        runs = self._runs_within(window)
        runs = None if runs is None else runs.view(samples, length)
        beyond = self.config.model.language.bidirectional_prefix
        return Packing(qkv_format="sbhd", cached=CachedAttention(rows, length, window, runs, beyond=beyond))

    def _runs_within(self, window: int | None) -> Tensor | None:
        """Return the runs of tokens that attend to one another both ways, [B·S], in layers with a sliding window of
        `window` tokens (None: in layers without a window); None if attention there is causal.
        """
        language = self.config.model.language
        everywhere = language.bidirectional_images or language.bidirectional_prefix
        return self._runs if everywhere or window is not None else None

    @cached_property
    def _runs(self) -> Tensor | None:
        """Return the number of each token's run of image tokens or prefix, [B·S]; None if all attention is causal."""
        model = self.config.model
        if model.language.bidirectional_prefix:
            return prefix_runs(self.batch.text.prefixes, self._bounds[-1], self.device)
        if not attends_both_ways(model.language):
            return None
        assert model.image_token is not None, "refused by the configuration rules"
        return image_runs(self.batch.row_tokens, model.image_token, self._run_lengths, model.video_token)

    @cached_property
    def _run_lengths(self) -> list[int]:
        """Return the number of tokens of each image or prefix with bidirectional attention; [0] without one."""
        model = self.config.model
        sizes = self.batch.image_sizes if self.batch.context is None else self.batch.context.image_sizes
        counts = sizes.image_tokens(model.projector) if attends_both_ways(model.language) else []
        if model.language.bidirectional_prefix:
            counts = [count for _, count in self.batch.text.prefixes]
        return counts or [0]

    @property
    def _bounds(self) -> list[int]:
        """Return the bounds of the sequences of the flattened rows, in tokens: 0, …, B·S."""
        rows, length = self.batch.row_tokens.shape
        cu_seqlens = self.batch.text.cu_seqlens
        return [*range(0, rows * length + 1, length)] if cu_seqlens is None else cu_seqlens.tolist()

    @cached_property
    def vision_rope(self) -> Rotation | None:
        """Return the rotary angles of vision layers; None if positions are learned."""
        vision = self.config.model.vision
        if vision.position_embedding == "learned":
            return None
        width = vision.hidden_size // vision.num_attention_heads
        angles = rope2d(
            self.layout.coordinates(self.device),
            head_width=width,
            base=vision.rotary_base,
            interleaved=vision.rotary_interleaved,
            neighbours=vision.rotary_neighbours,
            axes=vision.position_embedding == "axes_rope2d",
        )
        return rotation(angles, DTYPES[self.config.precision.dtype])

    @cached_property
    def language_rope(self) -> Rotation:
        """Return the rotary angles of language layers without a sliding window."""
        return self._rotation(unwindowed(self.config.model.language))

    def further_rope(self, depth: int) -> Rotation:
        """Return the rotary angles of the prediction layer `depth`, of positions `depth` + 1 places further on."""
        positions = self.batch.text.further_positions
        assert positions is not None, "`with_further_tokens` sets them"
        language, dtype = self.config.model.language, DTYPES[self.config.precision.dtype]
        return rotation(rope(positions[depth], language), dtype, language.rope_attention_factor)

    def followed(self, states: Tensor, steps: int) -> Tensor:
        """Return the states [S(/TP), B, H], shifted so that each position has the state of `steps` positions later.

        Ranks that share a row exchange the states at the ends of their parts; gradients go the opposite way. The last
        positions of a row get states from its beginning, which no loss depends on.
        """
        dims, shards = self.groups.dims, self.groups.dims.tp if sequence_parallel(self.config) else 1
        parts = dims.cp * shards
        if parts == 1:
            return states.roll(-steps, 0)
        length = self.batch.row_tokens.shape[1]
        split = dims.row_split if self.batch.context is not None else RowSplit()
        found = followers(split, length, parts=parts, steps=steps)
        collection, number = self.groups.collection, self.groups.coords.cp * shards
        group = collection.cp
        if shards > 1:
            group, number = collection.tp_cp, number + self.groups.coords.tp
        sent, rows = (each[number].to(self.device, non_blocking=True) for each in (found.sent, found.rows))
        arrived = gather_from_sequence_parallel_region(states.index_select(0, sent), group=group)
        return torch.cat([states, arrived]).index_select(0, rows)

    @cached_property
    def sliding_rope(self) -> Rotation:
        """Return the rotary angles of layers with a sliding window."""
        language = self.config.model.language
        if language.local_rotary_base is not None:
            share = 1.0 if language.rope_scaling == "proportional" else language.rotary_percent
            base = language.local_rotary_base
            language = replace(language, rotary_base=base, rope_scaling="none", rotary_percent=share)
        elif unwindowed(language) is language:
            return self.language_rope
        return self._rotation(language)

    def _rotation(self, language: LanguageConfig) -> Rotation:
        angles = rope(self.batch.text.positions, language)
        return rotation(angles, DTYPES[self.config.precision.dtype], language.rope_attention_factor)

    @property
    def tile_groups(self) -> tuple[TileGroup, ...]:
        """Return the tiles of each image; empty for models without tiles. A blank image is one base tile."""
        if self.layout.is_blank:
            return (TileGroup(grid=(0, 0), size=(0, 0)),) * (self.config.model.projector.anyres_max_tiles is not None)
        return self.batch.image_sizes.tile_groups

    @property
    def feature_shape(self) -> tuple[int, int, int]:
        """Return the shape [F, 1, Hl] of the features that the language model reads, also for a blank image."""
        model = self.config.model
        if self.batch.features is not None:
            return self.batch.features.positions.numel(), 1, model.language.hidden_size
        features = sum(tokens_per_grid(grid, model.projector) for grid in self.layout.grids)
        return features, 1, model.language.hidden_size

    def hidden_shape(self, name: str) -> tuple[int, int, int]:
        """Return the shape of the hidden states that layer `name` reads, on this tensor-parallel rank."""
        model, reads = self.config.model, layer_kind(name).reads
        shards = self.groups.dims.tp if sequence_parallel(self.config) else 1
        if reads is Stream.FRAMES:
            return self.sound_layout.bounds[-1] // shards, 1, model.audio.hidden_size
        if reads is Stream.PATCHES:
            return self.layout_at(name).bounds[-1] // shards, 1, model.vision.hidden_size
        if reads is Stream.TEXT:
            return self.state_shape
        rows = self.batch.num_features
        if self.layout.is_blank:
            (rows,) = tokens_per_image(self.layout.grids, self.tile_groups, model.projector)
        if reads is Stream.FEATURES and model.audio.num_layers:
            rows += self.sound_layout.features
        return rows, 1, model.language.hidden_size

    def passed_shape(self, name: str) -> tuple[int, int, int]:
        """Return the shape of each state that layer `name` receives in addition to hidden states (`states_before`)."""
        return self.state_shape if layer_kind(name).reads is Stream.TEXT else self.hidden_shape(AUDIO_EMBED)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Return the shape of the language model's hidden states on this tensor-parallel rank."""
        samples, length = self.batch.text.tokens.shape
        shards = self.groups.dims.tp if sequence_parallel(self.config) else 1
        return length // shards, samples, self.config.model.language.hidden_size

    @cached_property
    def routed_rows(self) -> RoutedRows:
        """Return the numbers of tokens and loss terms of this rank's rows, for the losses of routers."""
        places = self._row_places
        if sequence_parallel(self.config):
            places = places.view(self.groups.dims.tp, -1)[self.groups.coords.tp]
        tokens, trained = self._row_counts
        counted = (places[:, None] < tokens).float()
        parts = (tensor.to(self.device, non_blocking=True) for tensor in (counted, tokens.clamp(min=1), trained))
        return RoutedRows(*parts)

    @property
    def _row_places(self) -> Tensor:
        """Return the positions of its rows that this context-parallel rank has, [S/CP] int64."""
        split, length = self.groups.dims.row_split, self.batch.row_tokens.shape[1]
        if self.batch.context is None:
            return torch.arange(length)
        return order_of(split, length).view(split.ranks, -1)[self.groups.coords.cp]

    @property
    def _row_counts(self) -> tuple[Tensor, Tensor]:
        """Return the number of tokens without padding, and of loss terms, of each whole row, [B] float32 each."""
        text, length = self.batch.text, self.batch.row_tokens.shape[1]
        counts = text.row_counts or [(length, trained) for trained in text.loss_mask.sum(-1).tolist()]
        tokens, trained = torch.tensor(counts, dtype=torch.float32).unbind(-1)
        return tokens, trained

    @cached_property
    def _text_padding(self) -> Tensor | None:
        """Return whether each of this rank's positions is padding, [S/CP, B] bool; None unless `--qk-clip` needs it."""
        if "language" not in clipped_parts(self.config):
            return None
        tokens, _ = self._row_counts
        return (self._row_places[:, None] >= tokens).to(self.device, non_blocking=True)

    def _padding(self, layout: VisionLayout) -> Tensor | None:
        """Return whether each vision token is padding or blank, [V, 1] bool; None unless `--qk-clip` needs it."""
        if "vision" not in clipped_parts(self.config):
            return None
        real = 0 if layout.is_blank else sum(layout.lengths)
        return (torch.arange(layout.bounds[-1]) >= real)[:, None].to(self.device, non_blocking=True)

    @cached_property
    def feature_rows(self) -> Tensor:
        """Return the row of each feature of a colocated encoder in this rank's flattened hidden states, [F'] int64.

        The hidden states have S·B rows, or S/TP·B with sequence parallelism.
        """
        assert self.batch.features is not None
        samples, length = self.batch.text.tokens.shape
        positions = self.batch.features.positions
        first = self.groups.coords.tp * (length // self.groups.dims.tp) if sequence_parallel(self.config) else 0
        return (positions % length - first) * samples + positions // length

    def of_this_part(self, features: Tensor) -> Tensor:
        """Return the features [F', 1, H] of a context-parallel rank's part of the text, given those that it encoded."""
        dealt = None if self.batch.context is None else self.batch.context.images
        return features if dealt is None else self.exchanged(features, dealt).index_select(0, dealt.received)

    def exchanged(self, features: Tensor, dealt: DealtImages) -> Tensor:
        """Return the features [F', 1, H] that this context-parallel rank receives, given those that it has encoded.

        Ranks exchange features in an all-to-all; gradients go the opposite way.
        """
        sent, group = features.index_select(0, dealt.sent), self.groups.collection.cp
        received: Tensor = all_to_all(group, sent, list(dealt.received_sizes), list(dealt.sent_sizes))
        return received

    def with_features_merged(self, hidden: Tensor, features: Tensor) -> Tensor:
        """Return the hidden states [S(/TP), B, H] with a colocated encoder's features [F', H] at the image tokens."""
        merged = hidden.flatten(0, 1).index_copy(0, self.feature_rows, features.to(hidden.dtype))
        return merged.view_as(hidden)

    def with_features(self, hidden: Tensor, features: Tensor) -> Tensor:
        """Return the hidden states [S(/TP), B, H] with DeepStack features added at the image tokens."""
        if self.batch.features is not None:
            added = hidden.flatten(0, 1).index_add(0, self.feature_rows, features[:, 0].to(hidden.dtype))
            return added.view_as(hidden)
        return add_features(
            hidden,
            self.of_this_part(features),
            self.batch.text.feature_positions,
            length=self.batch.text.tokens.shape[1],
            sequence_group=self.groups.tp if sequence_parallel(self.config) else None,
        )


def _usual_length(vision: VisionConfig) -> int:
    """Return the number of vision tokens of a full-size image if the tower has learned positions, else 0."""
    if vision.position_embedding in ("rope2d", "axes_rope2d"):
        return 0
    return (vision.image_size // vision.patch_size) ** 2 + vision.class_token
