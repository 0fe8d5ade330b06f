"""A long prompt attends to its cache span by span, with the same result as all at once and small masks."""

from __future__ import annotations

import pytest
import torch

from megavlm.inputs.batch import Continuation, KeyValueCache
from megavlm.model.masks import CachedAttention

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
