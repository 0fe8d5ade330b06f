"""Attention of split rows is that of whole rows: every rank's part, followed on paper without processes, in float64."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megavlm.arch.dims import RowSplit
from megavlm.data.context_parts import order_of
from megavlm.model import context_attention
from megavlm.model.attention import CoreAttention
from megavlm.model.context_attention import (
    across_context,
    attend_to_earlier,
    causal_spans,
    heads_for_ranks,
    heads_of_ranks,
    in_order_of_rows,
    rows_of_ranks,
)
from megavlm.model.packing import Packing, packed
from megavlm.model.te import flattened
from megavlm.parallel.groups import ContextGroups
from tests.support.stand_ins import TEDotProductAttention

ROWS, LENGTH, HEADS, WIDTH = 2, 12, 12, 4
# Two rows of twelve: samples that cross the borders of parts, one of a single token, padding at the end.
PACKED = [0, *accumulate([5, 1, 4, 2, 7, 5])]
CONFIG = TransformerConfig(num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, attention_dropout=0.0)


def attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing | None) -> Tensor:
    core = CoreAttention(CONFIG, 1, AttnMaskType.causal, "self")
    return core(query, key, value, attn_mask_type=AttnMaskType.causal, packed_seq_params=packing)


def across_ranks(tensors: tuple[Tensor, ...], bounds: list[int] | None, split: RowSplit) -> Tensor:
    """What `ContextAttention` computes on all ranks, in the order of positions: messages are followed on paper."""
    order = order_of(split, LENGTH)
    cut = [tuple(x[order].unflatten(0, (split.ranks, -1))[rank] for x in tensors) for rank in range(split.ranks)]
    found = []
    for group in range(split.groups):
        ranks = range(group * split.heads, (group + 1) * split.heads)
        sent, sizes = zip(*(heads_for_ranks(cut[rank], split.heads) for rank in ranks), strict=True)
        rows = [rows_of_ranks(torch.stack([x[h] for x in sent])).split(sizes[0], dim=2) for h in range(split.heads)]
        found.append([[x.unflatten(2, (-1, WIDTH)) for x in parts] for parts in rows])
    back = [[attended(found, group, h, bounds, split) for h in range(split.heads)] for group in range(split.groups)]
    parts = [
        heads_of_ranks(torch.stack([x.unflatten(0, (split.heads, -1))[h].unflatten(-1, (-1, WIDTH)) for x in outputs]))
        for outputs in back
        for h in range(split.heads)
    ]
    return torch.cat(parts)[order.argsort()]


def attended(found: list[Any], group: int, head: int, bounds: list[int] | None, split: RowSplit) -> Tensor:
    """Return the attention of one rank: queries of its group's positions, keys and values of all positions."""
    query = found[group][head][0]
    if split.groups == 1:
        return attend(*found[group][head], None if bounds is None else packed(bounds, torch.device("cpu")))
    keys, values = (in_order_of_rows(torch.cat([each[head][at] for each in found]), split.groups) for at in (1, 2))
    spans = causal_spans(bounds or [0, LENGTH, 2 * LENGTH], rows=ROWS, split=split, group=group)
    core = CoreAttention(CONFIG, 1, AttnMaskType.causal, "self")
    return attend_to_earlier(query, keys, values, spans, core._attend)


SPLITS = [RowSplit(2), RowSplit(3), RowSplit(6), RowSplit(1, 2), RowSplit(1, 3), RowSplit(2, 3)]


@pytest.mark.parametrize("bounds", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("groups", [12, 4, 1])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_split_rows_attend_like_whole_rows(split: RowSplit, groups: int, bounds: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(split.ranks * groups)
    shapes = [(LENGTH, ROWS, heads, WIDTH) for heads in (HEADS, groups, groups)]
    tensors = tuple(torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    packing = None if bounds is None else packed(bounds, torch.device("cpu"))
    expected, found = attend(*tensors, packing), across_ranks(tensors, bounds, split)  # type: ignore[arg-type]
    above = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for ours, exact in zip(
        (found, *torch.autograd.grad(found, tensors, above)),
        (expected, *torch.autograd.grad(expected, tensors, above)),
        strict=True,
    ):
        assert (ours - exact).abs().max() <= 1e-12 * exact.abs().max()


def test_rows_of_answers_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key/value cache has whole rows, so generation exchanges nothing."""

    class Cached:
        def attend(self, core: object, query: Tensor, *_: Tensor, **how: float | None) -> Tensor:
            return query

    monkeypatch.setattr(context_attention, "all_to_all", None)
    attention = across_context(CoreAttention)(
        CONFIG,
        1,
        AttnMaskType.causal,
        "self",
        context=ContextGroups(RowSplit(2), None, None),  # type: ignore[arg-type]
    )
    query = torch.zeros(4, 1, HEADS, WIDTH)
    assert attention(query, query, query, packed_seq_params=Packing(cached=Cached())) is query  # type: ignore[arg-type]


def test_transformer_engine_gets_whole_rows_of_its_own_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks have the same half of a row: rank 0 receives its own heads of it twice."""
    monkeypatch.setattr(context_attention, "all_to_all", lambda group, parts: torch.stack([parts[0], parts[0]]))
    told, begin = [], TEDotProductAttention.__init__

    def told_of(self: TEDotProductAttention, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        told.append(config)
        begin(self, config, *args, **kwargs)

    monkeypatch.setattr(TEDotProductAttention, "__init__", told_of)
    module = across_context(flattened(TEDotProductAttention))(
        CONFIG,
        1,
        AttnMaskType.causal,
        "self",
        context=ContextGroups(RowSplit(2), None, None),  # type: ignore[arg-type]
        pg_collection=SimpleNamespace(tp=None, cp=None),
    )
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(6, 1, heads, WIDTH, generator=generator) for heads in (HEADS, 4, 4)]
    packing = packed([0, 5, 12], torch.device("cpu"))
    assert [config.num_attention_heads for config in told] == [HEADS // 2]
    TEDotProductAttention.calls.clear()
    found = module(*tensors, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packing)
    own = [torch.cat([x[:, :, : x.shape[2] // 2]] * 2) for x in tensors]
    expected = attend(*own, packing)[:6]  # type: ignore[call-arg]
    assert TEDotProductAttention.calls == ["thd"]
    assert torch.allclose(found, torch.cat([expected, expected], dim=2), atol=1e-6)
