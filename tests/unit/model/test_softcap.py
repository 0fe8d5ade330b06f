"""Bounds of attention scores and of logits, against plain torch."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from megavlm.model import cross_entropy
from megavlm.model.cross_entropy import LossOptions, linear_cross_entropy
from megavlm.model.masks import bounded_attention

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
