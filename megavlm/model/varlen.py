"""torch's attention over sequences of any lengths in one call: FlashAttention's kernels, on CUDA alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megavlm.precision.device import device_at_hand

WIDEST = 256  # heads that the kernels take, in multiples of 8


@cache
def kernel() -> Callable[..., Any] | None:
    """`torch.nn.attention.varlen.varlen_attn`, or None where torch has none or the device is older than Ampere."""
    if (device_at_hand().capability or (0, 0)) < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def takes(query: Tensor, key: Tensor) -> bool:
    """Return whether one call can attend in all sequences of these tensors."""
    return takes_heads(query.shape[-1], query.dtype, grouped=query.shape[1] != key.shape[1])


def takes_heads(width: int, dtype: torch.dtype, *, grouped: bool) -> bool:
    """Return whether one call can attend in all sequences of such heads: torch 2.11 can, for grouped queries 2.12."""
    attend = kernel()
    if attend is None:
        return False
    wanted = {"scale", "window_size"} | ({"enable_gqa"} if grouped else set())
    half = dtype in (torch.bfloat16, torch.float16)
    return half and width % 8 == 0 and width <= WIDEST and wanted <= _arguments(attend)


@cache
def _arguments(attend: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(attend).parameters)


def attend_in_all(
    query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams, *, causal: bool, scale: float | None
) -> Tensor:
    """query [T, N, D], key and value [T, G, D] → [T, N·D]."""
    attend = kernel()
    assert attend is not None
    shared: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    out: Tensor = attend(
        query,
        key,
        value,
        packing.cu_seqlens_q,
        packing.cu_seqlens_kv,
        packing.max_seqlen_q,
        packing.max_seqlen_kv,
        scale=scale,
        window_size=(-1, 0 if causal else -1),
        **shared,
    )
    return out.flatten(1)
