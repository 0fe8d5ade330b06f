"""Packed sequences: their bounds, runs of equal length, and the order of tokens.

cuDNN builds a plan for each new number of sequences, which takes longer than the attention of a step. So numbers of
sequences are rounded, and batches of equal sequences have few sizes.

Legend: S positions, B rows, T tokens of all rows.

`attend_in_all` is torch's attention over sequences of any lengths in one call: FlashAttention's kernels, on CUDA alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megavlm.model.delta_rule import Sequences
from megavlm.model.masks import CachedAttention, MaskedSpan
from megavlm.precision.device import device_at_hand

if TYPE_CHECKING:
    from megavlm.model.context_attention import CausalSpan


Run = tuple[int, int, int]  # (start, sequences, length)
Order = tuple[Tensor, Tensor]  # [T] int64 each: the token at each place, and the place of each token

ROUNDED = 32  # larger batches of equal sequences are a multiple of this


@dataclass
class Packing(PackedSeqParams):
    """Layout of packed sequences. Its `runs` are on the host, so that no layer has to synchronise with the device."""

    runs: tuple[Run, ...] = ()
    order: Order | None = None  # of tokens in attention, if it differs from the order in memory
    batch: tuple[int, int] = (0, 0)  # (sequences, length) of equal ones at the beginning, for one call without bounds
    rest: PackedSeqParams | None = None  # of the sequences after `batch`, if there are any
    masked: tuple[MaskedSpan, ...] = ()  # masks, if sequences alone do not say which keys a query attends to
    # [S, B] bool: positions whose queries are set to zero, so that their logits have no effect (`--qk-clip`)
    padding: Tensor | None = None
    causal: tuple[CausalSpan, ...] = ()  # the queries of a group of context-parallel ranks that gather keys
    sequences: Sequences | None = None  # for layers with linear attention
    cached: CachedAttention | None = None  # set while answers are generated: nothing else above is set then


def packed(
    bounds: Sequence[int],
    device: torch.device,
    *,
    usual: int = 0,
    order: Order | None = None,
    masked: tuple[MaskedSpan, ...] = (),
    causal: tuple[CausalSpan, ...] = (),
    padding: Tensor | None = None,
) -> Packing:
    """Return the packing of the sequences between `bounds`: 0, …, T.

    The layout stays [S, B, heads, width] ("sbhd"), because rotary angles come per position. `usual` is the most
    common length of sequences of the model, 0 without one.
    """
    runs = runs_of(bounds)
    count = equal_sequences(runs, usual)
    rest = None
    if count < len(bounds) - 1:
        behind = [bound - bounds[count] for bound in bounds[count:]]
        rest = PackedSeqParams(qkv_format="thd", **_bounds(behind, device))
    return Packing(
        qkv_format="sbhd",
        **_bounds(bounds, device),
        runs=runs,
        order=order,
        batch=(count, usual),
        rest=rest,
        masked=masked,
        causal=causal,
        padding=padding,
    )


def _bounds(bounds: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return megatron-core's fields, with empty sequences at the end up to a rounded number."""
    longest = max(end - start for start, end in pairwise(bounds))
    empty = [bounds[-1]] * (rounded_count(len(bounds) - 1) - len(bounds) + 1)
    cu_seqlens = torch.tensor([*bounds, *empty], dtype=torch.int32).to(device, non_blocking=True)
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


def rounded_count(sequences: int) -> int:
    """Round the number of sequences up to a power of two from 32 to 512, or to a multiple of 512 beyond.

    Transformer Engine 2.11 rounds so itself (`get_max_batch_size` in its fused attention), but not beyond 512.
    """
    return max(ROUNDED, 1 << (sequences - 1).bit_length()) if sequences <= 512 else -(-sequences // 512) * 512


def equal_sequences(runs: Sequence[Run], usual: int) -> int:
    """Return how many first sequences, all of the usual length, form a batch: up to 31, or a multiple of 32."""
    _, count, length = runs[0]
    if length != usual:
        return 0
    return count if count < ROUNDED else count // ROUNDED * ROUNDED


def runs_of(bounds: Sequence[int]) -> tuple[Run, ...]:
    """Return the runs of equally long sequences, without empty ones."""
    lengths = [end - start for start, end in pairwise(bounds)]
    runs, start = [], 0
    for length, group in groupby(lengths):
        count = len(list(group))
        if length:
            runs.append((start, count, length))
        start += count * length
    return tuple(runs)


def in_sequence(packing: Packing, x: Tensor) -> Tensor:
    """Return x [S, B, heads, D] as [T, heads, D]: rows one after the other, then in the packing's order."""
    # `squeeze` has a view as its gradient; that of an index is a tensor of zeros into which autograd copies.
    flat = x.squeeze(1) if x.shape[1] == 1 else x.transpose(0, 1).flatten(0, 1)
    return flat if packing.order is None else _Reordered.apply(flat, *packing.order)


def in_rows(packing: Packing, out: Tensor, rows: int) -> Tensor:
    """Return an output [T, N·D] in the packing's order as [S, B, N·D]; the inverse of `in_sequence`."""
    if packing.order is not None:
        out = _Reordered.apply(out, *reversed(packing.order))
    return out.view(rows, -1, out.shape[-1]).transpose(0, 1).contiguous()


class _Reordered(torch.autograd.Function):
    """x[order], with the gradient read in the inverse order, where autograd would add it up row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.inverse), None, None


WIDEST = 256  # heads that the kernels take, in multiples of 8
# Tokens up to which these kernels are faster than Transformer Engine's attention, which computes faster but takes the
# host 0.7 ms longer to launch: on an H100, forward and backward over 8 images of 577 tokens take 0.3 ms against 0.9,
# and over 2 of 3,888 and 2,852 tokens 2.1 against 1.7.
SHORT = 2048


@cache
def flash_kernel() -> Callable[..., Any] | None:
    """Return FlashAttention's operator, or None on a CPU and on devices older than Ampere.

    `torch.nn.attention.varlen.varlen_attn` wraps it in Python: forward and backward then take the host 0.55 ms in place
    of 0.2 ms.
    """
    if (device_at_hand().capability or (0, 0)) < (8, 0):
        return None
    return torch.ops.aten._flash_attention_forward.default


def fits_one_call(query: Tensor, value: Tensor) -> bool:
    """Return whether FlashAttention's kernels can compute all sequences in one call, by type and width of heads."""
    half = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] == value.shape[-1]
    return half and query.shape[-1] % 8 == 0 and query.shape[-1] <= WIDEST and flash_kernel() is not None


def is_faster_at_once(query: Tensor, key: Tensor, packing: PackedSeqParams) -> bool:
    """Return whether one call of FlashAttention is possible, and faster than Transformer Engine's attention."""
    return packing.max_seqlen_q <= SHORT and fits_one_call(query, key)


def attend_in_all(
    query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams, *, causal: bool, scale: float | None
) -> Tensor:
    """Return the attention [T, N·D] of query [T, N, D] to key and value [T, G, D], in one FlashAttention call."""
    attend = flash_kernel()
    assert attend is not None
    out: Tensor = attend(
        query,
        key,
        value,
        packing.cu_seqlens_q,
        packing.cu_seqlens_kv,
        packing.max_seqlen_q,
        packing.max_seqlen_kv,
        0.0,  # dropout
        causal,
        False,  # no mask for debugging
        scale=scale,
    )[0]
    return out.flatten(1)
