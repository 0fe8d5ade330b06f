"""The output layer's loss on tensor-parallel ranks against megatron-core's fp32 one: numbers, gradients, reductions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.pool import Pools

LENGTH, SAMPLES, WIDTH = 16, 3, 32


def compared(impl: str, precision: str, vocabulary: int, sequence_parallel: bool) -> dict[str, float]:
    """How far this rank's loss and gradients are from megatron-core's of fp32 logits, relative to the largest number;
    `reductions`: how often ranks met while the loss was computed.
    """
    from unittest.mock import patch

    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megavlm.backend import activate
    from megavlm.model import cross_entropy
    from megavlm.model.language import Output, padded_vocab
    from megavlm.model.specs import DTYPES
    from megavlm.model.te import te_cross_entropy
    from megavlm.parallel.dims import Dims
    from megavlm.parallel.groups import build_groups, destroy_groups, start
    from tests.support.stand_ins import te_parallel_cross_entropy

    start(activate(), timeout_minutes=30)
    destroy_groups()
    world, dtype = dist.get_world_size(), DTYPES[precision]
    groups = build_groups(Dims(tp=world, pp=1, vpp=1, dp=1), tied_owners=(0, 0), seed=1, timeout_minutes=30)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        tensor_model_parallel_size=world,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
    )
    generator = torch.Generator().manual_seed(7)
    rows = padded_vocab(vocabulary, world)
    weight = torch.randn(rows, WIDTH, generator=generator).chunk(world)[dist.get_rank()].to(dtype)
    whole = torch.randn(LENGTH, SAMPLES, WIDTH, generator=generator).to(dtype)
    hidden = whole.chunk(world)[dist.get_rank()] if sequence_parallel else whole
    labels = torch.randint(vocabulary, (SAMPLES, LENGTH), generator=generator)
    mask = torch.rand(SAMPLES, LENGTH, generator=generator) * (torch.arange(LENGTH) % 3 > 0)

    def of_fp32(logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
        return vocab_parallel_cross_entropy(logits.float(), labels.contiguous())

    def of_te(logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
        return te_cross_entropy(te_parallel_cross_entropy, logits, labels, group)

    def run(loss_function: Any) -> tuple[torch.Tensor, ...]:
        output = Output(vocabulary, layer_config=config, groups=groups, own_weight=True, cross_entropy=loss_function)
        output.linear.weight.data.copy_(weight)
        given = hidden.clone().requires_grad_()
        logits = output.logits(given)
        with patch.object(dist, "all_reduce", counted(dist.all_reduce)):
            loss = output.loss(logits, labels)
        (loss * mask).sum().backward()
        gradient = output.linear.weight.grad
        assert gradient is not None
        assert given.grad is not None
        assert not gradient[vocabulary - columns * dist.get_rank() :].any(), "padding has a gradient"
        return loss.detach(), given.grad, gradient

    calls, columns = 0, rows // world

    def counted(reduce: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return reduce(*args, **kwargs)

        return call

    expected = run(of_fp32)
    calls = 0
    with patch.object(cross_entropy, "LOSS_WORK", 5 * columns * 4):  # ten pieces of five positions
        found = run({"ours": cross_entropy.vocab_parallel_cross_entropy, "te": of_te}[impl])
    names = ("loss", "hidden", "weight")
    apart = {
        name: float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
        for name, ours, theirs in zip(names, found, expected, strict=True)
    }
    destroy_groups()
    return {**apart, "reductions": calls}


@pytest.mark.parametrize("impl", ["ours", "te"])
@pytest.mark.parametrize(
    ("world", "vocabulary", "sequence_parallel"),
    [(1, 40, False), (2, 39, False), (2, 39, True)],  # 39: the last rank has a column of padding
)
def test_loss_and_gradients_are_those_of_fp32_logits(
    pools: Pools, impl: str, world: int, vocabulary: int, sequence_parallel: bool
) -> None:
    bf16 = {"ours": 2**-8, "te": 2**-7}[impl]  # Transformer Engine rounds the softmax, and again its product
    for precision, loss, gradient in (("fp32", 1e-6, 1e-6), ("bf16", 1e-6, bf16)):
        for apart in pools(world).run(compared, impl, precision, vocabulary, sequence_parallel):
            assert apart["loss"] < loss, (precision, apart)
            assert max(apart["hidden"], apart["weight"]) < gradient, (precision, apart)
            assert apart["reductions"] == (2 if world > 1 and impl == "ours" else 0)
