"""Patch embedding, the layout of patches in the packed vision sequence, and the merger inside a tower.

Legend: N images (chunks of a video among them), C class tokens per image (0 or 1), V vision tokens = Σ (C + its
patches) + padding, H width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megavlm.arch.image_tokens import Grid
from megavlm.arch.layers import VISION_MERGER
from megavlm.arch.tensor_split import merger_width, mlp_share, vision_split
from megavlm.config.derived import tower_merge
from megavlm.config.schema import Config, VisionConfig
from megavlm.model.layer_modules import modules_of
from megavlm.model.packing import Packing
from megavlm.model.specs import layer_submodules
from megavlm.model.vision_ops import joint_window_order, resized_table
from megavlm.parallel.groups import Groups


@dataclass(frozen=True)
class VisionLayout:
    """Layout of the tokens of a micro-batch's images in the packed vision sequence.

    A micro-batch without images still sends one empty image of `blank` patches through the tower: every rank then
    runs the same collectives and every parameter gets a (zero) gradient, so nothing hangs and nothing changes.
    The packed sequence is padded to a multiple of `multiple` (for sequence parallelism), by one more sequence. With
    windows of `window` × `window` patches (0: none), patches are in window order, windows of equal size together
    (`vision_ops.py`). Without windows, and everywhere outside the tower, they are in order of images, row-major.
    """

    grids: tuple[Grid, ...]
    class_tokens: int
    padding: int
    is_blank: bool
    window: int = 0

    @classmethod
    def of(
        cls, grids: tuple[Grid, ...], *, class_token: bool, multiple: int, blank: Grid, window: int = 0
    ) -> VisionLayout:
        """Return the layout of images with these grids of patches."""
        assert not (window and class_token), "the configuration rules refuse this"
        is_blank = not grids
        grids = grids or (blank,)
        tokens = sum(class_token + math.prod(grid) for grid in grids)
        return cls(grids, int(class_token), padding=-tokens % multiple, is_blank=is_blank, window=window)

    def merged(self) -> VisionLayout:
        """Return the layout after each window has become one token; windows of one size are in order of images."""
        side = self.window
        grids = tuple((rows // side, columns // side) for rows, columns in self.grids)
        return replace(self, grids=grids, padding=self.padding // side**2, window=0)

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each image."""
        return [self.class_tokens + math.prod(grid) for grid in self.grids]

    @property
    def bounds(self) -> list[int]:
        """Return the bounds of sequences: one for each image, and one for the padding, if any."""
        return self._bounds(self.lengths)

    @property
    def window_bounds(self) -> list[int]:
        """Return the bounds of sequences: one for each window of an image, and one for the padding, if any."""
        return self._bounds(list(self._windows[1]))

    def _bounds(self, lengths: list[int]) -> list[int]:
        return list(accumulate(lengths + [self.padding] * bool(self.padding), initial=0))

    def patch_index(self, device: torch.device) -> Tensor:
        """Return the indices of the vision tokens that are patches, in row-major order of patches, [P] int64."""
        if self.window:
            return self._windows[0].argsort().to(device, non_blocking=True)
        starts = [0, *accumulate(self.lengths)]
        spans = [torch.arange(start + self.class_tokens, end, device=device) for start, end in pairwise(starts)]
        return torch.cat(spans)

    def in_tower_order(self, patches: Tensor) -> Tensor:
        """Return the row-major patches of all images [P, …] in the order of the tower."""
        if not self.window:
            return patches
        return patches.index_select(0, self._windows[0].to(patches.device, non_blocking=True))

    def image_order(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the order that makes each image's tokens consecutive, and its inverse, [V] int64; None if they are.

        Attention over an image does not depend on the order of its tokens.
        """
        if not self.window or len(self.grids) == 1:
            return None
        inverse = torch.cat([self._windows[0], torch.arange(self.padding) + len(self._windows[0])])
        return inverse.argsort().to(device, non_blocking=True), inverse.to(device, non_blocking=True)

    @cached_property
    def _windows(self) -> tuple[Tensor, tuple[int, ...]]:
        """Return the row-major index of each patch in the tower's order ([P] int64), and the lengths of the windows."""
        return joint_window_order(self.grids, self.window)

    def coordinates(self, device: torch.device) -> Tensor:
        """Return (row, column) of each token, [V, 2]; class tokens and padding have (0, 0)."""
        spans = []
        for rows, columns, *frames in self.grids:
            grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).view(-1, 2)
            spans += [torch.zeros(self.class_tokens, 2, dtype=torch.long), *[grid] * math.prod(frames)]
        inside = self.in_tower_order(torch.cat(spans))
        return torch.cat([inside, torch.zeros(self.padding, 2, dtype=torch.long)]).to(device, non_blocking=True)


class PatchEmbed(nn.Module):
    """Linear patch embedding with class token, learned positions and first norm: [P, D] → [V(/TP), 1, H].

    The norm comes after the positions (CLIP) or before them (GLM-4.1V). Pixels have a norm, too, if no layers follow.

    The output is computed whole on every tensor-parallel rank, then scattered: the scatter's backward gathers, so the
    replicated parameters get equal gradients everywhere and need no reduction.

    Where a patch spans T frames, a still image fills each with the same pixels x: Σ_t W_t·x = (Σ_t W_t)·x. The weight
    is whole, [H, C·T·p·p], and summed over time in each forward; the pixels come once. In a micro-batch with a video
    they come T times (`data/collate.py`), and the whole weight is taken.
    """

    reads_below = True  # it reads `proj`'s weight itself, to sum it over time

    def __init__(self, vision: VisionConfig, *, dtype: torch.dtype, groups: Groups, sequence_parallel: bool) -> None:
        super().__init__()
        self.vision = vision
        self.groups = groups
        self.sequence_parallel = sequence_parallel
        hidden = vision.hidden_size
        pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        self.proj = nn.Linear(pixels, hidden, bias=vision.patch_bias, dtype=dtype)
        self.pixel_norm: nn.Module = nn.Identity()
        if vision.encoder_free:
            self.pixel_norm = nn.LayerNorm(pixels, eps=vision.norm_epsilon, dtype=dtype)
        self.class_token = nn.Parameter(torch.empty(hidden, dtype=dtype)) if vision.class_token else None
        self.position = None
        if vision.position_embedding == "axes_rope2d":
            self.position = nn.Parameter(torch.empty(2, vision.axis_positions, hidden, dtype=dtype))
        elif vision.position_embedding != "rope2d":
            side = vision.image_size // vision.patch_size
            self.position = nn.Parameter(torch.empty(side * side + vision.class_token, hidden, dtype=dtype))
        self.norm: nn.Module = nn.Identity()
        if vision.pre_norm:
            norm = nn.LayerNorm if vision.normalization == "LayerNorm" else nn.RMSNorm
            self.norm = norm(hidden, eps=vision.norm_epsilon, dtype=dtype)

    def forward(self, patches: Tensor, layout: VisionLayout) -> Tensor:
        whole = not layout.is_blank and patches.shape[1] == self.proj.in_features
        weight = self.proj.weight if whole else self._weight_of_stills()
        if layout.is_blank:
            patches = weight.new_zeros(math.prod(layout.grids[0]), weight.shape[1])
        embedded = F.linear(self.pixel_norm(patches.to(weight.dtype)), weight, self.proj.bias)
        if self.vision.norm_before_position:
            embedded = self.norm(embedded)
        tables = {grid: self._positions(grid) for grid in dict.fromkeys(layout.grids)}
        pieces: list[Tensor] = []
        for grid, tokens in zip(layout.grids, embedded.split([math.prod(grid) for grid in layout.grids]), strict=True):
            if self.class_token is not None:
                tokens = torch.cat([self.class_token[None], tokens])
            table = tables[grid]
            pieces.append(tokens if table is None else tokens + table)
        hidden = layout.in_tower_order(torch.cat(pieces))
        if not self.vision.norm_before_position:
            hidden = self.norm(hidden)
        hidden = F.pad(hidden, (0, 0, 0, layout.padding))[:, None]
        if self.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.groups.tp)
        return hidden

    def _weight_of_stills(self) -> Tensor:
        """Return the weight for still images, [H, C·p·p]."""
        frames = self.vision.temporal_patch_size
        if frames == 1:
            return self.proj.weight
        return self.proj.weight.unflatten(1, (self.vision.in_channels, frames, -1)).sum(2).flatten(1)

    def _positions(self, grid: Grid) -> Tensor | None:
        """Return learned positions, [C + rows·columns, H]; those of a chunk's frames with their times, one by one."""
        table = self._places(grid[:2])
        if table is None or len(grid) == 2:
            return table
        times = sinusoids(grid[2], self.vision.hidden_size).to(table, non_blocking=True)
        return (table + times[:, None]).flatten(0, 1)

    def _places(self, grid: Grid) -> Tensor | None:
        """Return learned positions, [C + rows·columns, H], resized or looked up for grids of other sizes."""
        if self.position is None:
            return None
        if self.vision.position_embedding == "axes_rope2d":
            columns, rows = self.position
            return (rows[: grid[0], None] + columns[None, : grid[1]]).flatten(0, 1)
        side = self.vision.image_size // self.vision.patch_size
        count = int(self.vision.class_token)
        if self.vision.position_interpolation in ("bucket", "fraction"):
            divides = self.vision.position_interpolation == "fraction"
            rows, columns = (position_buckets(length, side, divides=divides) for length in grid)
            entries = count + (rows[:, None] * side + columns).flatten()
            grid_positions = self.position.index_select(0, entries.to(self.position.device, non_blocking=True))
            return torch.cat([self.position[:count], grid_positions])
        if grid == (side, side):
            return self.position
        resized = resized_table(self.position[count:], side, grid, self.vision.position_interpolation)
        return torch.cat([self.position[:count], resized])


def sinusoids(frames: int, width: int) -> Tensor:
    """Return the time of each frame of a chunk, [frames, width] fp32: sines, then cosines (MoonViT, as Kimi-K2.5's)."""
    turns = torch.outer(torch.arange(frames).float(), 10000 ** (-torch.arange(0, width, 2) / width))
    return torch.cat([turns.sin(), turns.cos()], dim=1)


def position_buckets(length: int, side: int, *, divides: bool = False) -> Tensor:
    """Return in which of an image's `side` equal parts each of `length` patches begins, [length] int64.

    Patch i of L begins at i/L, part j of S at j/S (NaViT's fractional positions; Idefics2). Both are rounded to fp32 as
    in the reference, i/L as i·(1/L), because rounding decides ties: with L = S = 19, patch 12 takes part 11.
    With `divides` i/L is rounded once (MiniCPM-V 4.6): with L = 25 and S = 70, some patches take another part.
    """
    starts = torch.arange(length, dtype=torch.float32)
    starts = starts / length if divides else starts * torch.tensor(length).reciprocal()
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(starts.clamp(max=1 - 1e-6), boundaries, right=True)


def rope2d(
    coordinates: Tensor,
    *,
    head_width: int,
    base: float,
    interleaved: bool = False,
    neighbours: bool = False,
    axes: bool = False,
) -> Tensor:
    """Return 2-D rotary angles (Qwen2-VL): the first quarter of the pairs follows the row, the next the column.

    Args:
        coordinates: [V, 2] rows and columns.
        interleaved: of the frequencies base^(−2i/D), rows have the even i and columns the odd i (Pixtral); otherwise
            both have the even i.
        neighbours: pairs follow the column and the row in turn (MoonViT), for rotation of neighbouring channels.
        axes: the first half of a head rotates with the column, the second with the row (Gemma 4).

    Returns:
        [V, 1, 1, head_width] angles; both halves are equal, as rotation of pairs from the two halves of a head needs,
        or with `neighbours` every two channels. With `axes` they are [V, 1, 2, head_width/2], of columns and of rows.
    """
    quarter = head_width // 4
    frequencies = base ** (-torch.arange(quarter, device=coordinates.device).float() / quarter)
    if neighbours:
        turns = frequencies[:, None] * coordinates.float().flip(1)[:, None]
        return turns.flatten(1).repeat_interleave(2, dim=-1)[:, None, None]
    if axes:
        angles = coordinates.flip(1).float()[:, :, None] * frequencies
        return torch.cat([angles, angles], dim=-1)[:, None]
    if interleaved:
        frequencies = torch.stack([frequencies, frequencies * base ** (-2 / head_width)])
    angles = (coordinates.float()[:, :, None] * frequencies).flatten(1)
    return torch.cat([angles, angles], dim=-1)[:, None, None]


class WindowMerger(MegatronModule):
    """Attention within each block of neighbouring patches, then an MLP of the block: [V(/TP), 1, H] → [V/4(/TP), 1, H].

    With y = x + attention(norm(x)), a block of y₁ … y₄ becomes (y₁ + … + y₄)/4 + MLP(norm(y₁ ‖ … ‖ y₄)), as in
    Transformers' MiniCPMV4_6ViTWindowAttentionMerger. Patches are in the order of their blocks, so that four
    tokens in a row are one block, also where sequence parallelism has sharded them.
    """

    def __init__(self, config: Config, layer_config: TransformerConfig, groups: Groups) -> None:
        vision, tp = config.model.vision, groups.dims.tp
        # Weights are drawn or loaded later; rows that pad them stay zero.
        layer_config = replace(
            layer_config,
            ffn_hidden_size=mlp_share(merger_width(vision), tp) * tp,
            init_method=nn.init.zeros_,
            output_layer_init_method=nn.init.zeros_,
        )
        super().__init__(config=layer_config)
        self.block = tower_merge(vision) ** 2
        modules = modules_of(VISION_MERGER, config, groups)
        parts = layer_submodules(
            replace(modules, column_linear=modules.column_linear_alone),  # without a norm inside
            AttnMaskType.no_mask,
            split=vision_split(vision, tp),
            qk_norm=None,
            branch=None,
            qkv_bias=vision.add_qkv_bias,
            activation=vision.activation,
        )
        inputs = vision.hidden_size * self.block
        norm = {"config": layer_config, "eps": vision.norm_epsilon}
        self.input_layernorm = build_module(modules.norm_alone, hidden_size=vision.hidden_size, **norm)
        self.self_attention = build_module(
            parts.self_attention, config=layer_config, layer_number=1, pg_collection=groups.collection
        )
        self.pre_mlp_layernorm = build_module(modules.norm_alone, hidden_size=inputs, **norm)
        self.mlp = build_module(parts.mlp, config=layer_config, input_size=inputs, tp_group=groups.collection.tp)

    def forward(self, hidden: Tensor, packing: Packing) -> Tensor:
        """Return the merged patches; each sequence of `packing` is a block."""
        normed = self.input_layernorm(hidden)
        attended, _ = self.self_attention(normed, attention_mask=None, packed_seq_params=packing)
        blocks = (hidden + attended).unflatten(0, (-1, self.block))  # [V/4(/TP), 4, 1, H]
        joined, _ = self.mlp(self.pre_mlp_layernorm(blocks.transpose(1, 2).flatten(2)))
        return blocks.mean(1) + joined
