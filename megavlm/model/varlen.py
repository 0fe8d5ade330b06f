"""torch's attention over sequences of any lengths in one call: FlashAttention's kernels, on CUDA alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megavlm.precision.device import device_at_hand

WIDEST = 256  # heads that the kernels take, in multiples of 8
# Tokens up to which these kernels are faster than Transformer Engine's attention, which computes faster, but takes its
# host 0.7 ms longer to start: on an H100, forward and backward over 8 images of 577 tokens take 0.3 ms against 0.9, and
# over 2 of 3,888 and 2,852 tokens 2.1 against 1.7.
SHORT = 2048


@cache
def kernel() -> Callable[..., Any] | None:
    """Return the operator, or None on a CPU and on devices older than Ampere.

    `torch.nn.attention.varlen.varlen_attn` is the same, wrapped in Python: forward and backward take the host 0.2 ms,
    the wrapper 0.55 ms.
    """
    if (device_at_hand().capability or (0, 0)) < (8, 0):
        return None
    operator: Callable[..., Any] = torch.ops.aten._flash_attention_forward.default
    return operator


def takes(query: Tensor, key: Tensor) -> bool:
    """Return whether one call can attend in all sequences."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and query.shape[-1] % 8 == 0 and query.shape[-1] <= WIDEST and kernel() is not None


def is_faster(query: Tensor, key: Tensor, packing: PackedSeqParams) -> bool:
    """Return whether one call is there and faster than Transformer Engine's attention."""
    return packing.max_seqlen_q <= SHORT and takes(query, key)


def attend_in_all(
    query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams, *, causal: bool, scale: float | None
) -> Tensor:
    """query [T, N, D], key and value [T, G, D] → [T, N·D]."""
    attend = kernel()
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
