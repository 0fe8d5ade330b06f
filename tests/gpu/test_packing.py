"""Packed sequences on a GPU: samples that share a row train as they do alone; TE's THD attention equals SDPA's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import model
from tests.gpu.model import BF16, near


@pytest.mark.parametrize("layers", ["torch", "te"])
def test_a_packed_row_trains_as_its_samples_do(layers: str, world: Any, request: pytest.FixtureRequest) -> None:
    from megavlm.data.collate import CollateSpec, collate

    def apart(config: Any) -> list[Any]:
        source, samples = model.samples_of(config)
        return [collate([[sample]], CollateSpec.of(config, source, seq_length=256)) for sample in samples]

    if layers == "te":
        request.getfixturevalue("transformer_engine")
    flags = ["--precision", "bf16", "--transformer-impl", layers]
    packed = model.results(flags, world)
    alone = model.results(flags, world, batches=apart)
    assert abs(packed["loss"] / alone["loss"] - 1) < 1e-3
    assert model.distance(packed, alone, "gradient") < BF16


@pytest.mark.parametrize("causal", [True, False])
def test_thd_attention_equals_sdpa_block_by_block(causal: bool, transformer_engine: Any, world: Any) -> None:
    """[tokens, heads, width] of sequences of unequal lengths, some empty, grouped queries: outputs and gradients."""
    lengths, heads, groups, width = (100, 156, 256, 1, 63), 8, 2, 128
    device, total = world.device, sum(lengths)
    generator = torch.Generator(device).manual_seed(1)
    inputs = [
        torch.randn(total, count, width, generator=generator, device=device, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, groups, groups)
    ]
    direction = torch.randn(total, heads * width, generator=generator, device=device, dtype=torch.bfloat16)
    bounds = torch.tensor([0, *accumulate(lengths), *[total] * (32 - len(lengths))], dtype=torch.int32, device=device)
    attention = transformer_engine.DotProductAttention(
        heads,
        width,
        num_gqa_groups=groups,
        qkv_format="thd",
        attn_mask_type="padding_causal" if causal else "padding",
        attention_dropout=0.0,
    )
    most = max(lengths)
    found = attention(
        *inputs, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=most, max_seqlen_kv=most
    ).reshape(total, -1)
    expected = blocks([value.detach().float().requires_grad_() for value in inputs], lengths, causal=causal)
    assert near(found, expected[0])
    found.backward(direction)
    expected[0].backward(direction.float())
    for value, exact in zip(inputs, expected[1], strict=True):
        assert value.grad is not None
        assert exact.grad is not None
        assert near(value.grad, exact.grad)


def blocks(inputs: list[Tensor], lengths: Sequence[int], *, causal: bool) -> tuple[Tensor, list[Tensor]]:
    """Each sequence by itself, in fp32."""
    outputs = []
    for parts in zip(*(value.split(list(lengths)) for value in inputs), strict=True):
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs), inputs
