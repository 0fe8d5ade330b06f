"""`--cuda-graphs` without a GPU: what is captured, what is replayed, and what runs as ever. Numbers are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megavlm.arch.layers import EMBEDDING, layer_names
from megavlm.config.schema import Config, LanguageConfig, ModelConfig
from megavlm.data.batch import MicroBatch
from megavlm.model.graphs import LayerGraphs
from megavlm.model.weights import initialize
from tests.support.harness import Single, text_batch

VOCABULARY, LAYERS = 61, 3


class Replayed:
    """Stands for `torch.cuda.make_graphed_callables`, and does to functions what it does (torch/cuda/graphs.py).

    A replay, which is counted, copies what it is given into the samples' memory (and would broadcast), but for what is
    there already: parameters.
    """

    def __init__(self) -> None:
        self.captures: list[list[tuple[int, ...]]] = []
        self.calls = 0

    def __call__(self, functions: Sequence[Any], samples: Sequence[tuple[Tensor, ...]]) -> list[Any]:
        self.captures.append([tuple(sample[0].shape) for sample in samples])
        assert all(sample[0].requires_grad and not sample[1].requires_grad for sample in samples)
        assert not any(isinstance(function, nn.Module) for function in functions), "would be changed in place"
        # A node of a parameter, which DDP keeps, belongs to the default stream: no capture may come upon it.
        assert all(value.is_leaf and not isinstance(value, nn.Parameter) for sample in samples for value in sample)
        return [self._graphed(*each) for each in zip(functions, samples, strict=True)]

    def _graphed(self, function: Any, sample: tuple[Tensor, ...]) -> Any:
        def graphed(*given: Tensor) -> Any:
            self.calls += 1
            assert len(given) == len(sample)
            in_place = [value.data_ptr() == memory.data_ptr() for value, memory in zip(given, sample, strict=True)]
            assert in_place == [False] * 4 + [True] * (len(given) - 4), "weights would be copied"
            return function(*(value.expand_as(memory) for value, memory in zip(given, sample, strict=True)))

        return graphed


@pytest.fixture
def chunk_and_replayed(single: Single) -> tuple[Any, Replayed]:
    language = LanguageConfig(num_layers=LAYERS, hidden_size=48, ffn_hidden_size=80, num_attention_heads=4)
    config = Config(model=ModelConfig(language=language))
    names = layer_names(config.model)
    chunk = single.chunk(config, names[names.index(EMBEDDING) :], vocab_size=VOCABULARY)
    initialize(chunk, config, vocab_size=VOCABULARY)
    replayed = Replayed()
    layers = {name: part for name, part in chunk.parts.items() if name.startswith("language.layers.")}
    chunk.graphs = LayerGraphs(layers, capture=replayed)
    return chunk.train(), replayed


def batch_of(length: int, *, seed: int) -> MicroBatch:
    return text_batch(torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed)))


def trained(chunk: Any, batch: MicroBatch) -> dict[str, Tensor]:
    """The losses and all gradients."""
    chunk.zero_grad(set_to_none=True)
    chunk.set_input_tensor(torch.zeros(1, 1, 48))
    losses = chunk(batch)
    losses.sum().backward()
    gradients = {name: param.grad.clone() for name, param in chunk.named_parameters()}
    return {"losses": losses.detach(), **gradients}


def test_calls_of_the_first_shape_are_replayed(chunk_and_replayed: tuple[Any, Replayed]) -> None:
    chunk, replayed = chunk_and_replayed
    for seed in (1, 2):
        found = trained(chunk, batch_of(17, seed=seed))
        graphs, chunk.graphs = chunk.graphs, None
        expected = trained(chunk, batch_of(17, seed=seed))
        chunk.graphs = graphs
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert replayed.captures == [[(17, 1, 48)] * LAYERS], "all layers together, once"
    assert replayed.calls == 2 * LAYERS


def test_other_shapes_evaluation_and_packed_rows_run_as_ever(chunk_and_replayed: tuple[Any, Replayed]) -> None:
    chunk, replayed = chunk_and_replayed
    trained(chunk, batch_of(17, seed=1))
    trained(chunk, batch_of(19, seed=1))
    for length in (17, 19, 1):
        chunk.eval()
        trained(chunk, batch_of(length, seed=1))
        chunk.train()
        with torch.no_grad():
            chunk.set_input_tensor(torch.zeros(1, 1, 48))
            assert chunk(batch_of(length, seed=1)).shape[-1] == length
    plain = batch_of(17, seed=1)
    packed = replace(plain, text=replace(plain.text, cu_seqlens=torch.tensor([0, 9, 17], dtype=torch.int32)))
    trained(chunk, packed)
    assert len(replayed.captures) == 1
    assert replayed.calls == LAYERS
