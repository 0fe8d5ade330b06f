"""Attention of split rows is that of whole rows: every rank's part, followed on paper without processes, in float64."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megavlm.model import context_attention
from megavlm.model.attention import CoreAttention
from megavlm.model.context_attention import heads_for_ranks, heads_of_ranks, rows_of_ranks, with_own_heads
from megavlm.model.packing import Packing, packed

ROWS, LENGTH, HEADS, WIDTH = 2, 12, 12, 4
# Two rows of twelve: samples that cross the borders of parts, one of a single token, padding at the end.
PACKED = [0, *accumulate([5, 1, 4, 2, 7, 5])]
CONFIG = TransformerConfig(num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, attention_dropout=0.0)


def attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing | None) -> Tensor:
    core = CoreAttention(CONFIG, 1, AttnMaskType.causal, "self")
    return core(query, key, value, attn_mask_type=AttnMaskType.causal, packed_seq_params=packing)


def across_ranks(tensors: tuple[Tensor, ...], packing: Packing | None, ranks: int) -> Tensor:
    """What `ContextAttention` computes on all ranks; rank i sends part j to rank j."""
    cut = [tuple(x.unflatten(0, (ranks, -1))[rank] for x in tensors) for rank in range(ranks)]
    sent, sizes = zip(*(heads_for_ranks(each, ranks) for each in cut), strict=True)
    back = []
    for rank in range(ranks):
        whole = rows_of_ranks(torch.stack([parts[rank] for parts in sent])).split(sizes[rank], dim=2)
        out = attend(*whole, packing)  # type: ignore[arg-type]
        back.append(out.unflatten(0, (ranks, -1)).unflatten(-1, (-1, WIDTH)))
    return torch.cat([heads_of_ranks(torch.stack([parts[rank] for parts in back])) for rank in range(ranks)])


@pytest.mark.parametrize("bounds", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("groups", [12, 4, 3, 1])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_split_rows_attend_like_whole_rows(ranks: int, groups: int, bounds: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(ranks * groups)
    shapes = [(LENGTH, ROWS, heads, WIDTH) for heads in (HEADS, groups, groups)]
    tensors = tuple(torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    packing = None if bounds is None else packed(bounds, torch.device("cpu"))
    expected, found = attend(*tensors, packing), across_ranks(tensors, packing, ranks)  # type: ignore[arg-type]
    above = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for ours, exact in zip(
        (found, *torch.autograd.grad(found, tensors, above)),
        (expected, *torch.autograd.grad(expected, tensors, above)),
        strict=True,
    ):
        assert (ours - exact).abs().max() <= 1e-12 * exact.abs().max()


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "ranks", "expected"),
    [
        (28, 4, 1, 2, (14, 2)),
        (28, 4, 1, 7, (4, 4)),  # each of the four repeated seven times: 28 over seven ranks
        (32, 8, 2, 8, (4, 2)),  # four on a tensor-parallel rank, repeated to eight
        (8, 2, 4, 2, (4, 4)),  # two ranks share a head: each has a copy, and repeats it
    ],
)
def test_attention_is_told_its_own_heads(heads: int, groups: int, tp: int, ranks: int, expected: tuple[int, int]):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * 4,
        num_attention_heads=heads,
        num_query_groups=groups,
        tensor_model_parallel_size=tp,
    )
    own = with_own_heads(config, ranks)
    assert (own.num_attention_heads, own.num_query_groups) == expected
    local = torch.zeros(3, 1, max(groups // tp, 1), 4)
    _, (queries, keys) = heads_for_ranks((torch.zeros(3, 1, heads // tp, 4), local), ranks)
    assert (queries * tp, keys * tp) == expected


def test_rows_of_answers_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key/value cache has whole rows, so generation exchanges nothing."""

    class Cached:
        def attend(self, core: object, query: Tensor, *_: Tensor, scale: float | None) -> Tensor:
            return query

    class Group:
        def size(self) -> int:
            return 2

    class Groups:
        cp = Group()

    monkeypatch.setattr(context_attention, "all_to_all", None)
    attention = context_attention.across_context(CoreAttention)(
        CONFIG, 1, AttnMaskType.causal, "self", pg_collection=Groups()
    )
    query = torch.zeros(4, 1, HEADS, WIDTH)
    assert attention(query, query, query, packed_seq_params=Packing(cached=Cached())) is query  # type: ignore[arg-type]
