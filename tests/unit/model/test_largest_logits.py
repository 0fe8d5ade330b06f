"""The largest logits of each head, in blocks, are those of the whole matrix of them."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megavlm.model.attention import CoreAttention, LogitAttention, largest_logits
from megavlm.model.packing import packed


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
