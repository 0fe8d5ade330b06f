"""The gated delta rule and the causal convolution before it, over packed sequences of any lengths.

A head has a state S [K, V], a linear map from keys to values. Each token decays the state, reads the value that S holds
for its key, and writes a share β of the difference to its own value (Yang et al. 2024):

    S_t = a_t·S_{t−1} + β_t·k_t·(v_t − (a_t·S_{t−1})ᵀk_t)ᵀ,    o_t = S_tᵀ·q_t,    a_t = exp(g_t), g_t ≤ 0.

Within a chunk of C tokens after a state S_0, with c_t = g_1 + … + g_t and u_t the value that token t writes, this is

    u_t = β_t·(v_t − e^{c_t}·S_0ᵀk_t − Σ_{j<t} e^{c_t − c_j}·(k_t·k_j)·u_j)
    o_t = e^{c_t}·S_0ᵀq_t + Σ_{j≤t} e^{c_t − c_j}·(q_t·k_j)·u_j
    S_C = e^{c_C}·S_0 + Σ_j e^{c_C − c_j}·k_j·u_jᵀ.

So all chunks solve one triangular system each, at once, and only a scan over the chunks of each sequence remains.
Chunks begin with their sequence: which other samples share a row changes no number, and no state passes from one to the
next.

A GPU takes the kernels of flash-linear-attention (`kernels`). Legend: T tokens of all sequences, N
value heads, K width of a key, V of a value, n chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megavlm.arch.mixers import CHUNK

TINY = 1e-6  # added to the squared length of a query or key


@cache
def kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the GPU kernels of the rule and of the convolution. A run on a GPU without them does not start
    (`precision/device.py`).
    """
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule, causal_conv1d


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences between `bounds`: 0, …, T, none of them empty. Tensors are made when they are first read."""

    bounds: tuple[int, ...]
    device: torch.device

    @cached_property
    def for_kernels(self) -> dict[str, Tensor]:
        """Return the bounds, [sequences + 1] int64, on the device and on the host, so that no kernel waits for them."""
        bounds = torch.tensor(self.bounds)
        return {"cu_seqlens": bounds.to(self.device, non_blocking=True), "cu_seqlens_cpu": bounds}

    @cached_property
    def places(self) -> Tensor:
        """Return the place of each token within its sequence, [T] int64."""
        found = torch.cat([torch.arange(end - start) for start, end in pairwise(self.bounds)])
        return found.to(self.device, non_blocking=True)

    @cached_property
    def chunks(self) -> Chunks:
        return chunks_of(self.bounds, self.device)


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks of all sequences: all first chunks, from the longest sequence on, then all second ones, and so on."""

    rows: Tensor  # [n, C] int64: the token at each place; T where there is none
    tokens: Tensor  # [T] int64: the place of each token among the n·C
    alive: tuple[int, ...]  # how many sequences have a first, second, … chunk: those of one number are consecutive
    order: Tensor  # [sequences] int64: the sequences, longest first
    ranks: Tensor  # [sequences] int64: the place of each sequence in `order`


def chunks_of(bounds: Sequence[int], device: torch.device, size: int = CHUNK) -> Chunks:
    """Return the chunks of sequences between `bounds`."""
    spans = list(pairwise(bounds))
    counts = [-(-(end - start) // size) for start, end in spans]
    order = sorted(range(len(spans)), key=lambda number: -counts[number])
    alive = [sum(count > number for count in counts) for number in range(max(counts))]
    numbered = [(number, spans[place]) for number, count in enumerate(alive) for place in order[:count]]
    first, end = torch.tensor([(start + number * size, end) for number, (start, end) in numbered]).unbind(-1)
    rows = first[:, None] + torch.arange(size)
    real = rows < end[:, None]
    tokens = torch.empty(bounds[-1], dtype=torch.int64)
    tokens[rows[real]] = real.flatten().nonzero()[:, 0]
    rows = torch.where(real, rows, bounds[-1])
    ranks = torch.tensor(order).argsort()
    tensors = (each.to(device, non_blocking=True) for each in (rows, tokens, torch.tensor(order), ranks))
    rows, tokens, by_length, ranks = tensors
    return Chunks(rows, tokens, tuple(alive), by_length, ranks)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, sequences: Sequences
) -> Tensor:
    """Return the rule's output [T, N, V], in the type of `value`. Queries and keys are normalised here.

    On a CPU only the inputs are saved for the backward pass, as by the kernels, and the rest is recomputed.

    Args:
        query, key: [T, N, K].
        value: [T, N, V].
        decay: g [T, N] float32, ≤ 0.
        beta: [T, N] in 0 … 1.
    """
    if query.is_cuda:
        inputs = (each[None] for each in (query, key, value, decay, beta))
        rule, _ = kernels()
        out: Tensor = rule(*inputs, use_qk_l2norm_in_kernel=True, output_final_state=False, **sequences.for_kernels)[0]
        return out[0]

    def run(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return delta_rule_by_chunks(query, key, value, decay, beta, sequences.chunks)[0]

    return checkpoint(run, query, key, value, decay, beta, use_reentrant=False, preserve_rng_state=False)


def delta_rule_by_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    chunks: Chunks,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [T, N, V] in the type of `value`, and last states [sequences, N, K, V] in float32 at least.

    `state` [sequences, N, K, V] is the state before the first token of each sequence; None: zeros. A token with a decay
    and a β of 0 leaves the state as it is.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    q, k, v, g, b = (_in_chunks(each.to(dtype), chunks) for each in (unit(query), unit(key), value, decay, beta))
    # In fp64: differences of sums of some hundreds, near 0, would have lost digits.
    total = g.double().cumsum(-1)  # [n, N, C]
    growth = total.exp().to(dtype)[..., None]
    between = (total[..., :, None] - total[..., None, :]).tril().to(dtype).exp().tril()  # e^{c_t − c_j}, 0 for j > t
    system = b[..., None] * (k @ k.mT) * between
    writes = torch.linalg.solve_triangular(
        system, torch.cat([b[..., None] * v, b[..., None] * growth * k], dim=-1), upper=False, unitriangular=True
    )
    values, reads = writes.split([v.shape[-1], k.shape[-1]], dim=-1)  # u = values − reads · S_0
    scaled = q * q.shape[-1] ** -0.5
    within = (scaled @ k.mT) * between
    scaled = scaled * growth
    remaining = k * (total[..., -1:] - total).to(dtype).exp()[..., None]
    kept = total[..., -1].to(dtype).exp()[..., None, None]
    if state is None:
        state = q.new_zeros(len(chunks.order), *q.shape[1:2], k.shape[-1], v.shape[-1])
    state = state.to(dtype)[chunks.order]
    outputs, ended, first = [], [], 0
    for count in chunks.alive:
        ended.append(state[count:])
        state, now = state[:count], slice(first, first + count)
        written = values[now] - reads[now] @ state
        outputs.append(scaled[now] @ state + within[now] @ written)
        state = kept[now] * state + remaining[now].mT @ written
        first += count
    states = torch.cat([state, *reversed(ended)])[chunks.ranks]
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1)[chunks.tokens]  # [T, N, V]
    return out.to(value.dtype), states


def unit(x: Tensor) -> Tensor:
    """Return queries or keys [..., K] scaled to length one, in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + TINY)


def _in_chunks(x: Tensor, chunks: Chunks) -> Tensor:
    """[T, N, …] → [n, N, C, …], zeros where there is no token."""
    padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, 1))
    return padded[chunks.rows].movedim(2, 1)


def causal_convolution(x: Tensor, weight: Tensor, sequences: Sequences) -> Tensor:
    """Return silu(Σ_j weight[:, W − 1 − j]·x[t − j]) of x [T, channels] and weight [channels, W], [T, channels].

    Tokens before the first one of a sequence are zeros.
    """
    if x.is_cuda:
        out: Tensor = kernels()[1](x[None], weight, activation="silu", **sequences.for_kernels)[0]
        return out[0]

    run = lambda x, weight: F.silu(convolved(x, weight, sequences.places))  # noqa: E731
    return checkpoint(run, x, weight, use_reentrant=False, preserve_rng_state=False)


def convolved(x: Tensor, weight: Tensor, places: Tensor) -> Tensor:
    """Return Σ_j weight[:, W − 1 − j]·x[t − j] of x [T, channels], for j up to a token's place in its sequence."""
    total = x * weight[:, -1]
    for back in range(1, weight.shape[1]):
        earlier = F.pad(x, (0, 0, back, 0))[: len(x)].masked_fill((places < back)[:, None], 0.0)
        total = total + earlier * weight[:, -1 - back]
    return total
