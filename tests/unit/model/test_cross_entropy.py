"""The cross entropy's bytes: what stays for the backward pass, and the most that is alive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.model import cross_entropy
from tests.support.live_bytes import LiveBytes

TOKENS, WIDTH, COLUMNS = 256, 8, 4096
ALONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
WORK = 8 * COLUMNS * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_kept_once_and_work_is_bounded(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LOSS_WORK", WORK)
    hidden, weight, labels = _inputs(dtype)
    logits_bytes = TOKENS * COLUMNS * dtype.itemsize
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    standing = LiveBytes([hidden, weight, labels])
    with standing:
        logits = hidden @ weight.t()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = cross_entropy.vocab_parallel_cross_entropy(logits, labels, ALONE)
        del logits
        baseline = TOKENS * WIDTH * dtype.itemsize + weight.numel() * dtype.itemsize + labels.numel() * 8
        assert standing.peak - baseline < logits_bytes + WORK + 64 * TOKENS
        loss.sum().backward()
        gradients = baseline
    assert sum(kept.values()) < logits_bytes + 32 * TOKENS
    assert standing.peak - baseline < logits_bytes + max(WORK, gradients) + 64 * TOKENS


def test_a_second_backward_pass_is_refused() -> None:
    """The first one wrote over the logits."""
    hidden, weight, labels = _inputs(torch.float32)
    loss = cross_entropy.vocab_parallel_cross_entropy(hidden @ weight.t(), labels, ALONE).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(COLUMNS, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(COLUMNS, (TOKENS,), generator=generator)
