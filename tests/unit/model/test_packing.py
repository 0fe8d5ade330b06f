"""Packed sequences in few calls of few shapes: the same numbers from Transformer Engine's layouts, torch's kernel for
all sequences at once, and one call per run of equal lengths.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megavlm.model import attention
from megavlm.model import packing as packing_module
from megavlm.model.attention import CoreAttention
from megavlm.model.packing import Packing, packed, rounded_count
from megavlm.model.te import flattened
from tests.support.stand_ins import TEDotProductAttention

CPU = torch.device("cpu")
HEADS, GROUPS, WIDTH = 4, 2, 8
USUAL = 3
LENGTHS = {
    "one batch": [3] * 7,
    "batch and rest": [3, 3, 2, 5, 2],
    "more than a batch": [3] * 37 + [2],
    "many": [2] * 600,
    "nothing usual": [4, 1],
    "usual ones come late": [4, 3, 3],
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", LENGTHS)
def test_te_layouts_give_the_numbers_of_runs(name: str, causal: bool) -> None:
    bounds = [0, *accumulate(LENGTHS[name])]
    order = torch.randperm(bounds[-1], generator=torch.Generator().manual_seed(2))
    for permuted in (None, (order, order.argsort())):
        packing = packed(bounds, CPU, usual=USUAL, order=permuted)
        TEDotProductAttention.calls.clear()
        found = attended(te_attention(causal), packing, causal=causal)
        assert_alike(found, attended(core_attention(), packing, causal=causal))
        expected = {"one batch": ["bshd"], "batch and rest": ["bshd", "thd"], "more than a batch": ["bshd", "thd"]}
        assert TEDotProductAttention.calls == expected.get(name, ["thd"])


@pytest.mark.parametrize("causal", [True, False])
def test_one_call_attends_in_all_sequences_where_torch_has_it(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, calls = count_calls(monkeypatch)
    packing = packed([0, *accumulate(LENGTHS["batch and rest"])], CPU)
    expected = attended(core_attention(), packing, causal=causal, dtype=torch.bfloat16)
    assert (len(runs), len(calls)) == (4, 0)
    monkeypatch.setattr(packing_module, "flash_kernel", lambda: calls_of_flash(calls))
    found = attended(core_attention(), packing, causal=causal, dtype=torch.bfloat16)
    assert (len(runs), len(calls)) == (4, 1)
    assert_alike(found, expected, tolerance=2**-7)


def test_a_towers_short_sequences_are_one_call_with_te_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of causal ones and long ones Transformer Engine's kernels are faster."""
    calls: list[str] = []
    monkeypatch.setattr(packing_module, "flash_kernel", lambda: calls_of_flash(calls))
    packing = packed([0, *accumulate(LENGTHS["batch and rest"])], CPU, usual=USUAL)
    expected = attended(core_attention(), packing, causal=False, dtype=torch.bfloat16)
    for causal, short, flash, te in ((False, 5, 1, 0), (False, 4, 0, 2), (True, 5, 0, 2)):
        calls.clear()
        TEDotProductAttention.calls.clear()
        monkeypatch.setattr(packing_module, "SHORT", short)
        found = attended(te_attention(causal), packing, causal=causal, dtype=torch.bfloat16)
        assert (len(calls), len(TEDotProductAttention.calls)) == (flash, te)
        if not causal:
            assert_alike(found, expected, tolerance=2**-7)


def test_the_kernel_takes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def qkv(dtype: torch.dtype = torch.bfloat16, width: int = WIDTH) -> tuple[Tensor, Tensor]:
        return torch.empty(5, HEADS, width, dtype=dtype), torch.empty(5, GROUPS, width, dtype=dtype)

    assert not packing_module.fits_one_call(*qkv())  # a CPU
    monkeypatch.setattr(packing_module, "flash_kernel", lambda: calls_of_flash([]))
    assert packing_module.fits_one_call(*qkv())
    for refused in (qkv(torch.float32), qkv(width=12), qkv(width=264)):
        assert not packing_module.fits_one_call(*refused)


def test_torch_has_the_operator_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's arguments, by name and order, begin those of the installed torch, and autograd knows it."""
    monkeypatch.setattr(packing_module, "device_at_hand", lambda: SimpleNamespace(capability=(9, 0)))
    packing_module.flash_kernel.cache_clear()
    operator: Any = packing_module.flash_kernel()
    packing_module.flash_kernel.cache_clear()
    theirs = [argument.name for argument in operator._schema.arguments]
    ours = list(inspect.signature(calls_of_flash([])).parameters)
    assert theirs[: len(ours)] == ours
    assert torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "Autograd")


@pytest.mark.parametrize(("sequences", "rounded"), [(1, 32), (32, 32), (33, 64), (512, 512), (513, 1024), (1025, 1536)])
def test_numbers_of_sequences_are_rounded_up(sequences: int, rounded: int) -> None:
    assert rounded_count(sequences) == rounded
    bounds: Any = packed(range(sequences + 1), CPU).cu_seqlens_q
    assert len(bounds) == rounded + 1
    assert bounds.tolist() == [*range(sequences + 1), *[sequences] * (rounded - sequences)]


def core_attention() -> CoreAttention:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=HEADS, attention_dropout=0.0)
    return CoreAttention(config, 1, AttnMaskType.causal, "self")


def te_attention(causal: bool) -> Any:
    collection = SimpleNamespace(tp=None, cp=None)
    kind = AttnMaskType.causal if causal else AttnMaskType.no_mask
    config = SimpleNamespace(attention_dropout=0.0, sequence_parallel=False)
    return flattened(TEDotProductAttention)(config, 1, kind, "self", pg_collection=collection)


def attended(module: Any, packing: Packing, *, causal: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The output and the gradients of query, key and value, which lie in one tensor as a projection writes them."""
    total = packing.runs[-1][0] + packing.runs[-1][1] * packing.runs[-1][2]
    generator = torch.Generator().manual_seed(1)
    heads = [HEADS, GROUPS, GROUPS]
    mixed = torch.randn(total, 1, sum(heads), WIDTH, generator=generator).to(dtype).requires_grad_()
    query, key, value = mixed.split(heads, dim=2)
    kind = AttnMaskType.causal if causal else AttnMaskType.no_mask
    out = module(query * 1, key * 1, value, None, attn_mask_type=kind, packed_seq_params=packing)
    assert out.shape == (total, 1, HEADS * WIDTH)
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    assert mixed.grad is not None
    return [out.detach(), mixed.grad]


def assert_alike(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-6) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def count_calls(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    runs: list[str] = []
    attend = F.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        runs.append("run")
        return attend(*args, **kwargs)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", counted)
    return runs, []


def calls_of_flash(calls: list[str]) -> Callable[..., tuple[Tensor]]:
    """Return a stand-in for `aten::_flash_attention_forward` of torch 2.13, which asks of tensors what that asks."""

    def flash(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor]:
        calls.append("all")
        assert cum_seq_q.dtype == cum_seq_k.dtype == torch.int32
        assert cum_seq_q[-1] == cum_seq_k[-1] == len(query)
        assert max_q == max_k == int(cum_seq_q.diff().max())
        assert all(x.dim() == 3 and x.stride(-1) == 1 and x.dtype == torch.bfloat16 for x in (query, key, value))
        assert (dropout_p, return_debug_mask) == (0.0, False)
        outputs = [_alone(query[a:b], key[a:b], value[a:b], scale, is_causal) for a, b in _spans(cum_seq_q)]
        return (torch.cat(outputs),)

    return flash


def _spans(bounds: Tensor) -> Sequence[tuple[int, int]]:
    return [(a, b) for a, b in pairwise(bounds.tolist()) if b > a]


def _alone(query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool) -> Tensor:
    scores = torch.einsum("qnd,knd->nqk", query, key.repeat_interleave(HEADS // GROUPS, dim=1)).float()
    scores = scores * (scale or WIDTH**-0.5)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
    out = torch.einsum("nqk,knd->qnd", scores.softmax(-1), value.repeat_interleave(HEADS // GROUPS, dim=1).float())
    return out.to(query.dtype)
