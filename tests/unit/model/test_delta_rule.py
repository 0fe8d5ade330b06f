"""The gated delta rule against a plain recurrence, and sequences that share a row against each alone."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megavlm.model import delta_rule
from megavlm.model.delta_rule import (
    Sequences,
    causal_convolution,
    chunks_of,
    convolved,
    delta_rule_by_chunks,
    gated_delta_rule,
    unit,
)

CPU = torch.device("cpu")
LENGTHS = (1, 63, 64, 65, 200, 7, 128)
LISTS = st.lists(st.integers(1, 150), min_size=1, max_size=6)


def bounds_of(lengths: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


def inputs(tokens: int, *, heads: int = 3, key: int = 10, value: int = 12) -> list[Tensor]:
    """Return queries, keys, values, decays from none to nearly all, and β, in float64."""
    generator = torch.Generator().manual_seed(tokens)
    query, keys = (torch.randn(tokens, heads, key, generator=generator, dtype=torch.float64) for _ in range(2))
    values = torch.randn(tokens, heads, value, generator=generator, dtype=torch.float64)
    decay, beta = (torch.rand(tokens, heads, generator=generator, dtype=torch.float64) for _ in range(2))
    return [query, keys, values, -5 * decay**4, beta]


def token_by_token(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs [T, N, V] and the last state [N, K, V] of one sequence, by the definition."""
    state = query.new_zeros(*query.shape[1:], value.shape[-1]) if state is None else state
    outputs = []
    for q, k, v, g, b in zip(unit(query), unit(key), value, decay, beta, strict=True):
        state = g.exp()[:, None, None] * state
        written = b[:, None] * (v - torch.einsum("nkv,nk->nv", state, k))
        state = state + torch.einsum("nk,nv->nkv", k, written)
        outputs.append(torch.einsum("nkv,nk->nv", state, q) * q.shape[-1] ** -0.5)
    return torch.stack(outputs), state


@pytest.mark.parametrize("size", [1, 16, 64])
def test_chunks_are_the_recurrence(size: int) -> None:
    bounds = bounds_of(LENGTHS)
    whole = inputs(bounds[-1])
    out, states = delta_rule_by_chunks(*whole[:5], chunks_of(bounds, CPU, size=size))
    for number, (start, end) in enumerate(pairwise(bounds)):
        expected, state = token_by_token(*(x[start:end] for x in whole))
        torch.testing.assert_close(out[start:end], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(states[number], state, rtol=0, atol=1e-12)


def test_a_sequence_goes_on_from_a_state() -> None:
    whole = inputs(150)
    expected, last = token_by_token(*whole)
    _, state = delta_rule_by_chunks(*(x[:70] for x in whole), chunks_of((0, 70), CPU))
    out, state = delta_rule_by_chunks(*(x[70:] for x in whole), chunks_of((0, 80), CPU), state)
    torch.testing.assert_close(out, expected[70:], rtol=0, atol=1e-12)
    torch.testing.assert_close(state[0], last, rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(LISTS)
def test_other_samples_of_a_row_change_no_number(lengths: list[int]) -> None:
    """In fp32, forward and backward: each sequence alone gives the same output and gradients."""
    bounds = bounds_of(lengths)
    whole = [x.float().requires_grad_() for x in inputs(bounds[-1])]
    out = gated_delta_rule(*whole[:5], Sequences(bounds, CPU))
    (together,) = (torch.autograd.grad(out.square().sum(), whole),)
    for start, end in pairwise(bounds):
        alone = [x.detach()[start:end].requires_grad_() for x in whole]
        single = gated_delta_rule(*alone[:5], Sequences((0, end - start), CPU))
        torch.testing.assert_close(out[start:end], single, rtol=0, atol=1e-6)
        gradients = torch.autograd.grad(single.square().sum(), alone)
        for mine, theirs in zip(together, gradients, strict=True):
            torch.testing.assert_close(mine[start:end], theirs, rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(LISTS, st.integers(1, 5))
def test_the_convolution_reads_its_own_sequence_alone(lengths: list[int], taps: int) -> None:
    bounds = bounds_of(lengths)
    x, weight = torch.randn(bounds[-1], 6, dtype=torch.float64), torch.randn(6, taps, dtype=torch.float64)
    out = causal_convolution(x, weight, Sequences(bounds, CPU))
    for start, end in pairwise(bounds):
        padded = torch.nn.functional.pad(x[start:end].T[None], (taps - 1, 0))
        expected = torch.nn.functional.conv1d(padded, weight[:, None], groups=6)[0].T
        torch.testing.assert_close(out[start:end], torch.nn.functional.silu(expected), rtol=0, atol=1e-12)


def test_positions_without_decay_and_beta_leave_the_state() -> None:
    query, key, value, decay, beta = inputs(90)
    real = (torch.arange(90) < 40).double()[:, None]
    _, padded = delta_rule_by_chunks(query, key, value, decay * real, beta * real, chunks_of((0, 90), CPU))
    _, state = delta_rule_by_chunks(*(x[:40] for x in (query, key, value, decay, beta)), chunks_of((0, 40), CPU))
    torch.testing.assert_close(padded, state, rtol=0, atol=1e-12)


def test_a_convolution_without_a_place_before_is_a_product() -> None:
    x, weight = torch.randn(5, 3), torch.randn(3, 4)
    assert torch.equal(convolved(x, weight, torch.zeros(5, dtype=torch.int64)), x * weight[:, -1])


def rule_of_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Take flash-linear-attention's arguments: one row of packed sequences, and as many query as value heads."""
    assert scale is None
    assert initial_state is None
    assert not output_final_state
    assert use_qk_l2norm_in_kernel
    assert q.shape[:3] == k.shape[:3] == v.shape[:3] == (*g.shape,) == (*beta.shape,)
    assert len(q) == 1
    query, key, value, decay, share = (each[0] for each in (q, k, v, g, beta))
    bounds = bounds_given(cu_seqlens, cu_seqlens_cpu)
    return delta_rule_by_chunks(query, key, value, decay, share, chunks_of(bounds, CPU))[0][None], None


def convolution_of_fla(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Take flash-linear-attention's arguments, of which the rest have their defaults: one row, [1, T, channels]."""
    assert bias is None
    assert activation == "silu"
    assert len(x) == 1
    sequences = Sequences(bounds_given(cu_seqlens, cu_seqlens_cpu), CPU)
    return torch.nn.functional.silu(convolved(x[0], weight, sequences.places))[None], None


def bounds_given(on_device: Tensor | None, on_host: Tensor | None) -> tuple[int, ...]:
    assert on_device is not None
    assert on_host is not None
    assert on_device.dtype == on_host.dtype == torch.int64
    assert torch.equal(on_device, on_host)
    return tuple(on_host.tolist())


def test_a_gpu_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = bounds_of([5, 70, 1])
    sequences, whole = Sequences(bounds, CPU), inputs(bounds[-1])
    x, weight = torch.randn(bounds[-1], 8), torch.randn(8, 4)
    expected = gated_delta_rule(*whole[:5], sequences), causal_convolution(x, weight, sequences)
    monkeypatch.setattr(delta_rule, "kernels", lambda: (rule_of_fla, convolution_of_fla))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = gated_delta_rule(*whole[:5], sequences), causal_convolution(x, weight, sequences)
    torch.testing.assert_close(found, expected)


def test_decays_of_a_state_that_is_forgotten_at_once_keep_their_gradients() -> None:
    """Sums of the decays of a chunk reach −1,000: in fp32 their differences would be off by 1e-4."""

    def gradient(dtype: torch.dtype) -> Tensor:
        query, key, value, _, beta = (x.to(dtype) for x in inputs(64))
        rate = torch.tensor([13.0, 2.7, 15.0], dtype=dtype, requires_grad=True)
        out, _ = delta_rule_by_chunks(query, key, value, (-rate).expand(64, 3), beta, chunks_of((0, 64), CPU))
        (found,) = torch.autograd.grad(out.sum(), rate)
        return found.double()

    torch.testing.assert_close(gradient(torch.float32), gradient(torch.float64), rtol=2e-5, atol=0)
