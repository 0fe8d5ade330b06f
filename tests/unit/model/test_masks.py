"""Attention by masks, in spans, against one mask written down token by token; a long prompt attends to its cache so."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.arch.layer_sizes import spans_of
from megavlm.arch.workload import sliding_squares
from megavlm.inputs.batch import Continuation, KeyValueCache
from megavlm.model import cross_entropy
from megavlm.model.cross_entropy import LossOptions, linear_cross_entropy
from megavlm.model.masks import CachedAttention, attend_in_spans, bounded_attention, image_runs, masked_spans

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


def test_attention_and_its_gradients() -> None:
    torch.manual_seed(0)
    query, key, value = (drawn(1, 3, count, 4) for count in (5, 7, 7))
    mask = torch.zeros(5, 7).masked_fill_(torch.rand(5, 7) < 0.3, -torch.inf)
    scores = query @ key.mT * 0.9
    wanted = torch.softmax(2 * torch.tanh(scores / 2) + mask, dim=-1) @ value
    found = bounded_attention(query, key, value, mask=mask, scale=0.9, softcap=2.0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    into = torch.randn_like(wanted)
    for ours, theirs in zip(
        *(torch.autograd.grad(out, (query, key, value), into) for out in (found, wanted)), strict=True
    ):
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
