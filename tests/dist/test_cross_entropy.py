"""The output layer's loss, some positions at a time, on tensor-parallel ranks against megatron-core's output layer and
fp32 cross entropy of whole logits: numbers, gradients, reductions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig

from megavlm.arch.dims import Dims
from megavlm.backend import activate
from megavlm.model import cross_entropy
from megavlm.model.language import Output, padded_vocab
from megavlm.model.specs import DTYPES
from megavlm.parallel.groups import build_groups, destroy_groups
from megavlm.parallel.rendezvous import start
from tests.support.pool import Pools
from tests.support.stand_ins import te_parallel_cross_entropy

LENGTH, SAMPLES, WIDTH = 16, 3, 32
CHUNKS = (48, 12)  # positions at a time: all, whose logits are kept; several times those that have a loss, alone


@dataclass(frozen=True)
class Case:
    """An output layer: which cross entropy, which numbers, how many positions at a time."""

    impl: str  # "ours" or "te"
    precision: str
    vocabulary: int
    sequence_parallel: bool
    chunk: int
    trained: bool = True


@dataclass(frozen=True, eq=False)
class Given:
    """What a rank's output layer gets: its rows of the weight, its hidden states, and labels with their gradients."""

    weight: Any  # [rows of this rank, width]
    hidden: Any  # [S, B, width], or this rank's part of S
    labels: Any  # [B, S]
    arrives: Any  # [B, S]: the gradient of each loss; 0 where a position has none

    def positions(self, chunk: int) -> Any:
        """Return the flat positions that have a loss; None where all are computed at once."""
        return None if chunk == LENGTH * SAMPLES else self.arrives.flatten().nonzero()[:, 0]


def given_to(case: Case, rank: int, world: int) -> Given:
    """Return this rank's part of tensors that are the same on all ranks."""
    generator, dtype = torch.Generator().manual_seed(7), DTYPES[case.precision]
    weight = torch.randn(padded_vocab(case.vocabulary, world), WIDTH, generator=generator).chunk(world)[rank].to(dtype)
    hidden = torch.randn(LENGTH, SAMPLES, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(case.vocabulary, (SAMPLES, LENGTH), generator=generator)
    arrives = torch.rand(SAMPLES, LENGTH, generator=generator) * (torch.arange(LENGTH) % 3 > 0)
    if case.precision != "fp32":  # a mask and a loss scale, whose products are exact; others round a gradient again
        arrives = (arrives > 0.2) * (512.0 if case.precision == "fp16" else 1.0)
    return Given(weight, hidden.chunk(world)[rank] if case.sequence_parallel else hidden, labels, arrives)


def output_layer(case: Case, given: Given, groups: Any) -> Any:
    """Return the output layer with this rank's weight."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        tensor_model_parallel_size=groups.tp.size(),
        sequence_parallel=case.sequence_parallel,
        params_dtype=given.weight.dtype,
    )
    loss = {
        "ours": cross_entropy.vocab_parallel_cross_entropy,
        "te": partial(cross_entropy.te_cross_entropy, te_parallel_cross_entropy),
    }[case.impl]
    output = Output(
        case.vocabulary, layer_config=config, groups=groups, own_weight=True, cross_entropy=loss, chunk=case.chunk
    )
    output.linear.weight.data.copy_(given.weight)
    output.requires_grad_(case.trained)
    return output


def loss_in_chunks(output: Any, hidden: Any, case: Case, given: Given, real: int) -> Any:
    return output(hidden, given.labels, given.positions(case.chunk))


def loss_of_whole_logits(output: Any, hidden: Any, case: Case, given: Given, real: int) -> Any:
    """Return megatron-core's loss of fp32 logits, of which only the `real` columns are of the vocabulary."""
    logits = output.logits(hidden).float()
    logits = logits.masked_fill(torch.arange(logits.shape[-1]) >= real, -1e30)
    return vocab_parallel_cross_entropy(logits, given.labels.t().contiguous()).t()


def loss_and_gradients(way: Any, case: Case, given: Given, groups: Any) -> tuple[dict[str, Any], int]:
    """Return the losses that count, the gradient of the hidden states, and that of the weight if it is trained; and how
    often ranks met for the loss.
    """
    output, hidden = output_layer(case, given, groups), given.hidden.clone().requires_grad_()
    columns = len(given.weight)
    real = min(columns, case.vocabulary - columns * groups.tp.rank())
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        loss = way(output, hidden, case, given, real)
    (loss * given.arrives).sum().backward()
    found = {"loss": loss.detach() * (given.arrives > 0), "hidden": hidden.grad}
    gradient = output.linear.weight.grad
    assert (gradient is not None) == case.trained
    if gradient is not None:
        assert not gradient[real:].any(), "padding has a gradient"
        found["weight"] = gradient
    return found, reduce.call_count


def compared(case: Case) -> dict[str, float]:
    """How far this rank's loss and gradients are from megatron-core's of fp32 logits, relative to the largest number;
    `reductions`: how often ranks met for each chunk of positions.
    """
    start(activate(), timeout_minutes=30)
    destroy_groups()
    world = dist.get_world_size()
    groups = build_groups(Dims(tp=world, pp=1, vpp=1, dp=1), tied_owners=(0, 0), seed=1, timeout_minutes=30)
    given = given_to(case, dist.get_rank(), world)
    expected, _ = loss_and_gradients(loss_of_whole_logits, case, given, groups)
    with patch.object(cross_entropy, "LOSS_WORK", 5 * len(given.weight) * 4):  # pieces of five positions or a few more
        found, meetings = loss_and_gradients(loss_in_chunks, case, given, groups)
    positions = given.positions(case.chunk)
    chunks = 1 if positions is None else -(-len(positions) // case.chunk)
    destroy_groups()
    apart = {
        name: float((ours.float() - expected[name].float()).abs().max() / expected[name].float().abs().max())
        for name, ours in found.items()
    }
    return {**apart, "reductions": meetings / chunks, "chunks": chunks}


BF16 = {"ours": 2**-8, "te": 2**-7}  # Transformer Engine rounds the softmax, and again its product
PRECISIONS = {"ours": ("fp32", "bf16", "fp16"), "te": ("fp32", "bf16")}
REDUCTIONS = {"ours": 2, "te": 1}  # a chunk, beside the kernel's own


@pytest.mark.parametrize("impl", ["ours", "te"])
@pytest.mark.parametrize(
    ("world", "vocabulary", "sequence_parallel"),
    [(1, 400, False), (2, 399, False), (2, 399, True)],  # 399: the last rank has a column of padding
)
def test_loss_and_gradients_are_those_of_fp32_logits(pools, impl, world, vocabulary, sequence_parallel):
    allowed = {"fp32": 1e-6, "bf16": BF16[impl], "fp16": 2**-10}
    for precision in PRECISIONS[impl]:
        for chunk in CHUNKS:
            case = Case(impl, precision, vocabulary, sequence_parallel, chunk)
            for apart in pools(world).run(compared, case):
                assert apart["loss"] < 1e-6, (case, apart)
                assert max(apart["hidden"], apart["weight"]) < allowed[precision], (case, apart)
                assert apart["reductions"] == (world > 1) * REDUCTIONS[impl]
                assert (apart["chunks"] > 1) == (chunk < CHUNKS[0])


def test_a_frozen_output_layer_passes_gradients_on(pools: Pools) -> None:
    for apart in pools(2).run(compared, Case("ours", "fp32", 399, True, 12, trained=False)):
        assert "weight" not in apart
        assert max(apart["loss"], apart["hidden"]) < 1e-6, apart
