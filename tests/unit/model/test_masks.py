"""What attention sees, and where: masks, windows, rotations, and ranks that split a sequence."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, groupby, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megavlm.arch.dims import RowSplit
from megavlm.arch.layer_sizes import spans_of
from megavlm.arch.workload import sliding_squares, window_squares
from megavlm.data.context_parts import order_of
from megavlm.inputs.batch import Continuation, KeyValueCache
from megavlm.model import context_attention, cross_entropy
from megavlm.model.attention import CoreAttention, LogitAttention, largest_logits
from megavlm.model.context_attention import (
    across_context,
    attend_to_earlier,
    causal_spans,
    heads_for_ranks,
    heads_of_ranks,
    in_order_of_rows,
    rows_of_ranks,
)
from megavlm.model.cross_entropy import LossOptions, linear_cross_entropy
from megavlm.model.masks import CachedAttention, attend_in_spans, eager_attention, image_runs, masked_spans
from megavlm.model.packing import Packing, packed
from megavlm.model.rotary import Rotary, rotation
from megavlm.model.te import flattened
from megavlm.model.vision_ops import window_order
from megavlm.parallel.groups import ContextGroups
from tests.support.stand_ins import TEDotProductAttention

IMAGE = 9
# Two rows of 16: an image of four, one of three at the end of a sample; one of four behind another, one split in two.
TOKENS = torch.tensor(
    [[1, 9, 9, 9, 9, 2, 9, 9, 9, 1, 1, 2, 3, 4, 5, 6], [9, 9, 9, 9, 9, 9, 9, 9, 1, 9, 9, 1, 9, 2, 3, 4]]
)
FEATURES = (4, 3, 4, 4, 3)
RUNS = [0, 1, 1, 1, 1, 0, 2, 2, 2, *[0] * 7, 3, 3, 3, 3, 4, 4, 4, 4, 0, 5, 5, 0, 6, 0, 0, 0]
BOUNDS = [0, 9, 16, 32]


def allowed(query: int, key: int, window: int | None, both_ways: bool) -> bool:
    (sequence,) = [range(a, b) for a, b in pairwise(BOUNDS) if a <= query < b]
    sees = key <= query or (both_ways and RUNS[query] == RUNS[key] > 0)
    return key in sequence and sees and (window is None or key > query - window)


def test_runs_are_consecutive_tokens_of_one_image() -> None:
    assert image_runs(TOKENS, IMAGE, FEATURES).tolist() == RUNS
    assert image_runs(TOKENS * 0, IMAGE, [0]).tolist() == [0] * 32


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("step", [1, 5, 32])
def test_spans_attend_as_one_mask_does(window: int | None, both_ways: bool, step: int) -> None:
    runs = image_runs(TOKENS, IMAGE, FEATURES) if both_ways else None
    spans = masked_spans(
        BOUNDS,
        window=window,
        runs=runs,
        longest=4 if both_ways else 0,
        device=torch.device("cpu"),
        dtype=torch.float64,
        step=step,
    )
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(32, heads, 6, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    mask = torch.tensor([[allowed(q, k, window, both_ways) for k in range(32)] for q in range(32)])

    def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    expected = attend(
        *(x.transpose(0, 1)[None] for x in (query, *(x.repeat_interleave(2, 1) for x in (key, value)))), mask=mask
    )
    found = attend_in_spans(query, key, value, spans, attend)
    torch.testing.assert_close(found, expected[0].transpose(0, 1).flatten(1))


def test_a_window_bounds_the_scores_that_are_computed() -> None:
    def scores(length: int, window: int | None) -> int:
        return sum(span.scores for span in spans_of([0, length], window=window, longest=256))

    assert scores(65536, None) < 0.52 * 65536**2
    # 512 queries, 1,023 keys before them, and 255 behind.
    assert scores(65536, 1024) <= 65536 * (512 + 1023 + 255)


def test_squares_count_the_pairs_of_a_window() -> None:
    length, window = 4000, 300
    pairs = sum(min(place + 1, window) for place in range(length))
    assert sliding_squares(length, window) == pytest.approx(2 * pairs, rel=1e-3)
    assert sliding_squares(200, window) == 200**2


B, S, ROOM, N, G, D = 2, 11, 20, 4, 2, 8


def attended(step: int, *, window: int | None, runs: bool) -> tuple[list[torch.Tensor], int]:
    """Return the outputs of a prompt and of two more tokens, and the entries of the largest mask of a row."""
    generator = torch.Generator().manual_seed(1)
    images = torch.tensor([[0, 1, 1, 1, 1, 0, 2, 2, 2, 0, 0], [0] * 3 + [1] * 8]) if runs else None
    last = torch.tensor([S - 1, S - 3])
    rows, outputs, largest = Continuation(KeyValueCache(ROOM), torch.zeros(B, dtype=torch.int64), last), [], 0
    for positions in (S, 1, 1):
        attention = CachedAttention(rows, positions, window, images if positions == S else None, step)
        query, key, value = (torch.randn(positions, B, heads, D, generator=generator) for heads in (N, G, G))
        outputs.append(attention.attend("layer", query, key, value, scale=None))
        largest = max(largest, *(mask[0].numel() for mask in attention._masks()))
        rows = rows.advanced()
    return outputs, largest


@pytest.mark.parametrize(("window", "runs"), [(None, False), (None, True), (3, True)])
def test_spans_attend_as_the_whole_prompt_does(window: int | None, runs: bool) -> None:
    whole, all_at_once = attended(S, window=window, runs=runs)
    spans, largest = attended(4, window=window, runs=runs)
    torch.testing.assert_close(spans, whole)
    assert (all_at_once, largest) == (S * ROOM, 4 * ROOM)


ALONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("softcap", "with_sinks"), [(2.0, False), (None, True), (2.0, True)])
def test_attention_and_its_gradients(softcap: float | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    sinks = drawn(3) if with_sinks else None
    query, key, value = (drawn(1, 3, count, 4) for count in (5, 7, 7))
    mask = torch.zeros(5, 7).masked_fill_(torch.rand(5, 7) < 0.3, -torch.inf)
    scores = query @ key.mT * 0.9
    scores = (2 * torch.tanh(scores / 2) if softcap else scores) + mask
    if sinks is not None:  # a last key, whose value is zero
        scores = torch.cat([scores, sinks[:, None, None].expand(1, 3, 5, 1)], dim=-1)
    wanted = torch.softmax(scores, dim=-1) @ F.pad(value, (0, 0, 0, int(with_sinks)))
    found = eager_attention(query, key, value, mask=mask, scale=0.9, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    into = torch.randn_like(wanted)
    inputs = [x for x in (query, key, value, sinks) if x is not None]
    for ours, theirs in zip(*(torch.autograd.grad(out, inputs, into) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_logits_and_gradients_with_chunks_and_without() -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, requires_grad=True) for shape in ((9, 6), (11, 6)))
    labels = torch.randint(0, 10, (9,))
    logits = 1.5 * torch.tanh((hidden @ weight[:10].t()) / 1.5)  # the last row is padding
    wanted = F.cross_entropy(logits, labels, reduction="none")
    into = torch.rand(9)
    expected = torch.autograd.grad(wanted, (hidden, weight), into)
    for chunk in (4, 16):
        entropy = partial(cross_entropy.vocab_parallel_cross_entropy, softcap=1.5)
        options = LossOptions(group=ALONE, real=10, chunk=chunk, cross_entropy=entropy, softcap=1.5)
        found = linear_cross_entropy(hidden, weight, labels, options)
        torch.testing.assert_close(found, wanted)
        for ours, theirs in zip(torch.autograd.grad(found, (hidden, weight), into), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


SIDES = st.integers(1, 9)


@given(SIDES, SIDES, st.integers(1, 5))
def test_each_window_is_one_tile(rows: int, columns: int, side: int) -> None:
    order, lengths = window_order((rows, columns), side)
    assert sorted(order.tolist()) == list(range(rows * columns))
    tiles = [
        {(patch // columns // side, patch % columns // side) for patch in span.tolist()}
        for span in order.split(lengths)
    ]
    assert all(len(tile) == 1 for tile in tiles)
    assert len(set.union(*tiles)) == len(tiles) == -(-rows // side) * -(-columns // side)
    assert len(list(groupby(lengths))) <= 4
    assert sum(length**2 for length in lengths) == window_squares((rows, columns), side)


TURNED, BATCH, GROUPS, CHANNELS = 7, 2, 3, 8


def by_hand(mixed: Tensor, angles: Tensor, repeats: int, *, interleaved: bool) -> tuple[Tensor, ...]:
    """Splitting by autograd, and Transformers' formula of the rotation."""
    query, key, value = mixed.split([repeats * CHANNELS, CHANNELS, CHANNELS], dim=-1)
    turned, width = [], angles.shape[-1]
    for whole in (query.reshape(TURNED, BATCH, -1, CHANNELS), key):
        x = whole[..., :width]
        first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        partners = torch.stack((-second, first), -1).flatten(-2) if interleaved else torch.cat((-second, first), -1)
        rotated = x * angles.cos().to(x.dtype) + partners * angles.sin().to(x.dtype)
        turned.append(torch.cat((rotated, whole[..., width:]), -1))
    return *turned, value


@pytest.mark.parametrize("rows", [1, BATCH])
@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [CHANNELS, CHANNELS // 2])
def test_numbers_are_those_of_splitting_and_turning(dtype, interleaved, repeats, rows, channels):
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(TURNED, BATCH, GROUPS, (repeats + 2) * CHANNELS, generator=generator).to(dtype)
    half = torch.rand(TURNED, rows, 1, channels // 2, generator=generator) * 9
    angles = half.repeat_interleave(2, dim=-1) if interleaved else torch.cat([half, half], -1)
    rotary, turns = Rotary(interleaved=interleaved), rotation(angles, dtype)
    found = []
    for split in (
        lambda mixed: rotary.split_and_rotate(mixed, [repeats * CHANNELS, CHANNELS, CHANNELS], turns),
        lambda mixed: by_hand(mixed, angles, repeats, interleaved=interleaved),
    ):
        mixed = given.clone().requires_grad_()
        heads = split(mixed)
        gradients = [torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(dtype) for x in heads]
        found.append((*heads, *torch.autograd.grad(heads, mixed, gradients)))
    tolerance = 1e-6 if dtype is torch.float32 else 2**-7  # two products and a sum, each rounded to 2^-9
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


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
    back = [[attended_by(found, group, h, bounds, split) for h in range(split.heads)] for group in range(split.groups)]
    parts = [
        heads_of_ranks(torch.stack([x.unflatten(0, (split.heads, -1))[h].unflatten(-1, (-1, WIDTH)) for x in outputs]))
        for outputs in back
        for h in range(split.heads)
    ]
    return torch.cat(parts)[order.argsort()]


def attended_by(found: list[Any], group: int, head: int, bounds: list[int] | None, split: RowSplit) -> Tensor:
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


def plain(query: Tensor, key: Tensor, *, scale: float, allowed: Tensor) -> Tensor:
    logits = scale * query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT
    return logits.masked_fill(~allowed, 0.0).amax((0, 2, 3)).clamp(min=0)


@pytest.mark.parametrize("most", [1, 40, 130, 10**6])
@pytest.mark.parametrize("kind", ["full", "causal", "lower right", "mask"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_blocks_have_the_largest_of_all(groups: int, kind: str, most: int):
    generator = torch.Generator().manual_seed(groups)
    keys = 9 if kind == "lower right" else 7
    query = torch.randn(3, 4, 7, 5, generator=generator)
    key = torch.randn(3, groups, keys, 5, generator=generator)
    allowed = torch.ones(7, keys, dtype=torch.bool)
    mask = None
    if kind in ("causal", "lower right"):
        allowed = allowed.tril(keys - 7)
        mask = causal_lower_right(7, keys) if kind == "lower right" else None
    elif kind == "mask":
        allowed = torch.rand(7, keys, generator=generator) > 0.5
        mask = torch.zeros(7, keys).masked_fill(~allowed, -torch.inf)
    found = largest_logits(query, key, scale=0.3, causal=kind == "causal", mask=mask, most=most)
    torch.testing.assert_close(found, plain(query, key, scale=0.3, allowed=allowed))


def attention() -> LogitAttention:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=0.0)
    return LogitAttention(config, 1, AttnMaskType.causal, "self")


def test_attention_is_the_same_and_keeps_the_largest_of_training_passes():
    found = attention()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=0.0)
    theirs = CoreAttention(config, 1, AttnMaskType.causal, "self")
    heads = torch.randn(3, 6, 1, 2, 4).unbind(0)
    packing = packed([0, 2, 6], torch.device("cpu"))
    for each in (found, theirs):
        each.train()
    with torch.no_grad():
        found(*heads, None, AttnMaskType.causal, packed_seq_params=packing)
    found.eval()
    found(*heads, None, AttnMaskType.causal, packed_seq_params=packing)
    assert not found.largest.any(), "neither a pass without gradients nor an evaluation counts"
    found.train()
    ours = found(*heads, None, AttnMaskType.causal, packed_seq_params=packing)
    assert torch.equal(ours, theirs(*heads, None, AttnMaskType.causal, packed_seq_params=packing))
    query, key = (x.permute(1, 2, 0, 3) for x in heads[:2])
    allowed = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool().tril()
    expected = plain(query, key, scale=0.5, allowed=allowed)
    torch.testing.assert_close(found.largest.float(), expected)
    found(*(x * 0.5 for x in heads), None, AttnMaskType.causal, packed_seq_params=packing)
    torch.testing.assert_close(found.largest.float(), expected, msg="smaller ones change nothing")
