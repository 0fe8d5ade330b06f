"""The output layer's loss, some positions at a time, on tensor-parallel ranks against megatron-core's output layer and
fp32 cross entropy of whole logits: numbers, gradients, reductions.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.pool import Pools

LENGTH, SAMPLES, WIDTH = 16, 3, 32
CHUNKS = (48, 12)  # positions at a time: all, whose logits are kept; several times those that have a loss, alone


def compared(
    impl: str, precision: str, vocabulary: int, sequence_parallel: bool, chunk: int, trained: bool = True
) -> dict[str, float]:
    """How far this rank's loss and gradients are from megatron-core's of fp32 logits, relative to the largest number;
    `reductions`: how often ranks met for each chunk of positions.
    """
    from functools import partial
    from unittest.mock import patch

    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megavlm.backend import activate
    from megavlm.model import cross_entropy
    from megavlm.model.language import Output, padded_vocab
    from megavlm.model.specs import DTYPES
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
    arrives = torch.rand(SAMPLES, LENGTH, generator=generator) * (torch.arange(LENGTH) % 3 > 0)
    if precision != "fp32":  # a mask and a loss scale, whose products with a gradient are exact; others round it again
        arrives = (arrives > 0.2) * (512.0 if precision == "fp16" else 1.0)
    positions = None if chunk == LENGTH * SAMPLES else arrives.flatten().nonzero()[:, 0]
    chunks = 1 if positions is None else -(-len(positions) // chunk)
    columns = rows // world
    real = min(columns, vocabulary - columns * dist.get_rank())
    losses = {
        "ours": cross_entropy.vocab_parallel_cross_entropy,
        "te": partial(cross_entropy.te_cross_entropy, te_parallel_cross_entropy),
    }
    calls = 0

    def counted(reduce: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return reduce(*args, **kwargs)

        return call

    def run(*, ours: bool) -> list[torch.Tensor]:
        output = Output(
            vocabulary, layer_config=config, groups=groups, own_weight=True, cross_entropy=losses[impl], chunk=chunk
        )
        output.linear.weight.data.copy_(weight)
        output.requires_grad_(trained)
        given = hidden.clone().requires_grad_()
        if ours:
            with patch.object(dist, "all_reduce", counted(dist.all_reduce)):
                loss = output(given, labels, positions)
        else:
            logits = output.logits(given).float()
            padding = torch.arange(columns) >= real
            loss = vocab_parallel_cross_entropy(logits.masked_fill(padding, -1e30), labels.t().contiguous()).t()
        (loss * arrives).sum().backward()
        assert given.grad is not None
        if not trained:
            assert output.linear.weight.grad is None
            return [loss.detach() * (arrives > 0), given.grad]
        gradient = output.linear.weight.grad
        assert gradient is not None
        assert not gradient[real:].any(), "padding has a gradient"
        return [loss.detach() * (arrives > 0), given.grad, gradient]

    expected = run(ours=False)
    with patch.object(cross_entropy, "LOSS_WORK", 5 * columns * 4):  # pieces of five positions or a few more
        found = run(ours=True)
    apart = {
        name: float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
        for name, ours, theirs in zip(("loss", "hidden", "weight"), found, expected, strict=False)
    }
    destroy_groups()
    return {**apart, "reductions": calls / chunks, "chunks": chunks}


BF16 = {"ours": 2**-8, "te": 2**-7}  # Transformer Engine rounds the softmax, and again its product
PRECISIONS = {"ours": ("fp32", "bf16", "fp16"), "te": ("fp32", "bf16")}
REDUCTIONS = {"ours": 2, "te": 1}  # a chunk, beside the kernel's own


@pytest.mark.parametrize("impl", ["ours", "te"])
@pytest.mark.parametrize(
    ("world", "vocabulary", "sequence_parallel"),
    [(1, 400, False), (2, 399, False), (2, 399, True)],  # 399: the last rank has a column of padding
)
def test_loss_and_gradients_are_those_of_fp32_logits(
    pools: Pools, impl: str, world: int, vocabulary: int, sequence_parallel: bool
) -> None:
    allowed = {"fp32": 1e-6, "bf16": BF16[impl], "fp16": 2**-10}
    for precision in PRECISIONS[impl]:
        for chunk in CHUNKS:
            for apart in pools(world).run(compared, impl, precision, vocabulary, sequence_parallel, chunk):
                assert apart["loss"] < 1e-6, (precision, chunk, apart)
                assert max(apart["hidden"], apart["weight"]) < allowed[precision], (precision, chunk, apart)
                assert apart["reductions"] == (world > 1) * REDUCTIONS[impl]
                assert (apart["chunks"] > 1) == (chunk < CHUNKS[0])


def test_a_frozen_output_layer_passes_gradients_on(pools: Pools) -> None:
    for apart in pools(2).run(compared, "ours", "fp32", 399, True, 12, False):
        assert apart["loss"] < 1e-6, apart
        assert apart["hidden"] < 1e-6, apart
