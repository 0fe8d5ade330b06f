"""Rotary embedding, and the split of the fused projection into queries, keys and values.

Legend: S positions, B rows, G local key/value heads with R query heads each, N = G·R, D head width. `mixed`
[S, B, G, (R + 2)·D] has for each key/value head its queries, its key and its value; `sizes` are R·D, D and D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.config.derived import is_latent, rotary_channels
from megavlm.config.schema import LanguageConfig

Heads = tuple[Tensor, Tensor, Tensor]  # query [S, B, N, D], key and value [S, B, G, D]


class Rotation(NamedTuple):
    """Rotary angles with cos and sin, once for all layers: [S, B or 1, 1, D], the same for both channels of a pair.

    D may be less than a head's width: then the head's other channels do not rotate. Angles [S, 1, 2, D/2] are of two
    axes, each of which rotates a half of a head (Gemma 4).
    """

    angles: Tensor  # float32
    cos: Tensor  # in the type that layers compute in, as in Transformers
    sin: Tensor
    factor: float = 1.0  # by which cos and sin are multiplied

    @property
    def of_axes(self) -> bool:
        """Return whether each half of a head rotates by itself."""
        return self.angles.shape[2] > 1

    def axes(self) -> tuple[Rotation, ...]:
        """Return the rotation of each half of a head."""
        return tuple(Rotation(*parts) for parts in zip(*(x.split(1, dim=2) for x in self[:3]), strict=True))


def rotation(angles: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Rotation:
    """Return the rotary angles with cos and sin in `dtype`, both multiplied by `factor`."""
    cos, sin = ((x if factor == 1 else x * factor).to(dtype) for x in (angles.cos(), angles.sin()))
    return Rotation(angles, cos, sin, factor)


class Rotary:
    """Rotary embedding with torch. Uncompiled: three kernels for queries, three for keys, and one that copies values.

    A pair of channels has one channel from each half of a head, or if `interleaved` two neighbours.
    """

    def __init__(
        self, compiled: Callable[[Any], Any] = lambda function: function, *, interleaved: bool = False
    ) -> None:
        self._turned, self._split, self._joined = compiled(turned), compiled(split_and_turned), compiled(joined)
        self._interleaved = interleaved

    def split(self, mixed: Tensor, sizes: Sequence[int]) -> Heads:
        """Return queries, keys and values from the fused projection."""
        query, key, value = mixed.split(sizes, dim=-1)
        return query.reshape(*query.shape[:2], -1, sizes[1]), key, value

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return heads [S, B, heads, D], rotated by the angles."""
        if rotation.of_axes:
            halves = zip(x.chunk(2, dim=-1), rotation.axes(), strict=True)
            return torch.cat([self.rotate(half, axis) for half, axis in halves], dim=-1)
        return _Rotate.apply(x, rotation.cos, rotation.sin, self._turned, self._interleaved)

    def split_and_rotate(self, mixed: Tensor, sizes: Sequence[int], rotation: Rotation) -> Heads:
        """Return the tensors of `split` with queries and keys rotated. Values are copied, to free `mixed`."""
        return _SplitAndRotate.apply(
            *(mixed, sizes[1], rotation.cos, rotation.sin), *(self._split, self._joined, self._interleaved)
        )


class _Rotate(torch.autograd.Function):
    """Rotation by θ, whose backward pass rotates by −θ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, turn: Any, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turn, ctx.interleaved = turn, interleaved
        return turn(x, cos, sin, 1, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.turn(grad, *ctx.saved_tensors, -1, ctx.interleaved), None, None, None, None


class _SplitAndRotate(torch.autograd.Function):
    """Split and rotation. The backward pass writes into one gradient of `mixed`; autograd would join three tensors."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, width: int, cos: Tensor, sin: Tensor, split: Any, join: Any, interleaved: bool
    ) -> Heads:
        ctx.save_for_backward(cos, sin)
        ctx.join, ctx.interleaved = join, interleaved
        return split(mixed, width, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        return ctx.join(*grads, *ctx.saved_tensors, ctx.interleaved), None, None, None, None, None, None


def split_and_turned(mixed: Tensor, width: int, cos: Tensor, sin: Tensor, interleaved: bool) -> Heads:
    """Split the fused projection, and return queries and keys rotated by θ, and a copy of the values."""
    parts = mixed.unflatten(-1, (-1, width))
    queries, keys, values = parts[..., :-2, :], parts[..., -2, :], parts[..., -1, :]
    turned_queries = mixed.new_empty(queries.shape)
    query = rotate(queries, cos[:, :, None], sin[:, :, None], out=turned_queries, interleaved=interleaved)
    key = rotate(keys, cos, sin, out=mixed.new_empty(keys.shape), interleaved=interleaved)
    return query.flatten(2, 3), key, values.contiguous()


def joined(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return the inverse of `split_and_turned`: queries and keys rotated by −θ, in one tensor with the values."""
    queries = query.unflatten(2, (key.shape[2], -1))  # [S, B, G, R, D]
    mixed = key.new_empty(*key.shape[:3], queries.shape[3] + 2, key.shape[3])
    out = mixed[..., :-2, :]
    rotate(queries, cos[:, :, None], sin[:, :, None], out=out, sense=-1, interleaved=interleaved)
    rotate(key, cos, sin, out=mixed[..., -2, :], sense=-1, interleaved=interleaved)
    mixed[..., -1, :].copy_(value)
    return mixed.flatten(-2)


def turned(x: Tensor, cos: Tensor, sin: Tensor, sense: int, interleaved: bool) -> Tensor:
    """Return `x` rotated by θ, or by −θ if `sense` is −1."""
    return rotate(x, cos, sin, out=x.new_empty(x.shape), sense=sense, interleaved=interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor, sense: int = 1, interleaved: bool = False) -> Tensor:
    """Write x·cos θ + sense·(−x₂, x₁)·sin θ to `out` and return it.

    x₁ and x₂ are the halves of the last dimension, or if `interleaved` its even and odd channels. Channels past the
    last angle are copied.
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
        rotate(x[..., :width], cos, sin, out=out[..., :width], sense=sense, interleaved=interleaved)
        return out
    half = x.shape[-1] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    torch.mul(x, cos, out=out)
    out[..., first].addcmul_(x[..., second], sin[..., first], value=-sense)
    out[..., second].addcmul_(x[..., first], sin[..., second], value=sense)
    return out


def rope(positions: Tensor, language: LanguageConfig) -> Tensor:
    """Return the rotary angles (Su et al. 2021) of positions [B or 1, S], as [S, B or 1, 1, channels].

    With M-RoPE (Wang et al. 2024, Qwen2-VL) positions are [3, B, S], and each pair of channels follows one of the axes.
    """
    if language.mrope_section:
        axes = torch.tensor(mrope_axes(language.mrope_section, interleaved=language.mrope_interleaved))
        moved = positions.index_select(0, axes.to(positions.device, non_blocking=True)).permute(2, 1, 0)
    else:
        moved = positions.t()[:, :, None]
    angles = moved.float() * frequencies(language, device=positions.device)
    if language.rotary_interleaved:
        both = angles.repeat_interleave(2, dim=-1)
        if is_latent(language) or language.rope_attention_factor != 1:
            return both[:, :, None]
        return F.pad(both, (0, language.kv_channels - both.shape[-1]))[:, :, None]  # channels that do not rotate
    return torch.cat([angles, angles], dim=-1)[:, :, None]


def mrope_axes(section: tuple[int, ...], *, interleaved: bool) -> list[int]:
    """Return the axis (0 time, 1 height, 2 width) that each pair of channels rotates with, fastest pair first.

    Sections divide the pairs (Qwen2-VL): all of time, then height, then width. Interleaved (Qwen3-VL), pairs alternate
    time, height, width, so that each axis has fast and slow pairs; once height or width is complete, time has the rest.
    """
    time, height, width = section
    if not interleaved:
        return [0] * time + [1] * height + [2] * width
    counts = (0, height, width)
    return [i % 3 if i // 3 < counts[i % 3] else 0 for i in range(sum(section))]


def frequencies(language: LanguageConfig, *, device: torch.device) -> Tensor:
    """Return the angle per position of each pair of the D rotating channels, [D/2]: base^(−2i/D), lower where scaled.

    Llama 3.1's scaling by s (its reference implementation, `apply_scaling`): with w the wavelength 2π/f, a wave shorter
    than L/high keeps its frequency, one longer than L/low turns s times slower, and in between the two are mixed in
    proportion to how far L/w lies from low to high.

    Proportional frequencies (Gemma 4) are plain ones, of which the lowest 1 − `rotary_percent` are zero.

    YaRN (Peng et al. 2023) mixes in proportion to the number i of the pair: with the frequency base^(−2i/D) it makes n
    turns within L at i = D/2 · ln(L / 2πn) / ln base. The bounds are rounded away from one another, as in its reference
    implementation, unless `rope_truncate` is off.
    """
    width = rotary_channels(language)
    plain = language.rotary_base ** (-torch.arange(0, width, 2, device=device).float() / width)
    if language.rope_scaling == "none":
        return plain
    if language.rope_scaling == "proportional":
        rotating = int(language.rotary_percent * width / 2)
        return torch.cat([plain[:rotating], torch.zeros_like(plain[rotating:])])
    slow = plain / language.rope_scaling_factor
    if language.rope_scaling == "linear":
        return slow
    if language.rope_scaling == "yarn":
        first, last = _yarn_bounds(language)
        share = ((torch.arange(width // 2, device=device).float() - first) / (last - first)).clamp(0, 1)
        return torch.lerp(plain, slow, share)
    low, high = language.rope_low_freq_factor, language.rope_high_freq_factor
    turns = language.rope_original_positions * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(slow, plain, share)


def _yarn_bounds(language: LanguageConfig) -> tuple[float, float]:
    """Return the last rotary pair that keeps its frequency, and the first with a frequency divided by the factor."""
    width = rotary_channels(language)

    def pair_of(turns: float) -> float:
        length = math.log(language.rope_original_positions / (2 * math.pi * turns))
        return width / 2 * length / math.log(language.rotary_base)

    first, last = pair_of(language.rope_beta_fast), pair_of(language.rope_beta_slow)
    if language.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return first, last if last != first else first + 1e-3
