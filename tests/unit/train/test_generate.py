"""What generation sends through the pipeline."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.command_line.parsing import parse
from megavlm.data.collate import CollateSpec
from megavlm.data.synthetic import SyntheticSource
from megavlm.data.types import Sample
from megavlm.inputs.batch import MicroBatch
from megavlm.train import generate


@pytest.mark.parametrize(("multiple", "length"), [(1, 20), (3, 21), (32, 32)])
def test_a_token_costs_few_positions(multiple: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequence parallelism shards them, and FP8 takes multiples of 16 on each rank."""
    monkeypatch.setattr(generate, "_interleave", lambda engine, mine, *, total: mine)
    shapes = []

    def logits(batches: list[MicroBatch]) -> list[Tensor]:
        shapes.extend(tuple(batch.text.tokens.shape) for batch in batches)
        scores = torch.zeros(2, 1, 256)
        scores[..., 7] = 1
        return [scores] * len(batches)

    engine, spec, prompts = _asked(logits, multiple)
    assert generate.generate(engine, spec, prompts, micro_batch_size=2, max_new_tokens=3) == [[7] * 3] * 2
    assert shapes == [(2, length), (2, multiple), (2, multiple)]


def test_answers_are_given_up_with_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate.dist, "all_reduce", lambda flags, op: None)
    passes = []

    def logits(batches: list[MicroBatch]) -> list[Tensor]:
        passes.append(1)
        return [torch.eye(256)[None, 7:8].repeat(2, 1, 1)] * len(batches)

    engine, spec, prompts = _asked(logits, 1)
    with pytest.raises(generate.GivenUp):
        generate.generate(
            engine, spec, prompts, micro_batch_size=2, max_new_tokens=9, stop=[8], give_up=lambda: len(passes) == 3
        )
    assert len(passes) == 3


def _asked(logits: Any, multiple: int) -> tuple[Any, CollateSpec, list[Sample]]:
    config = parse(["--seq-length", "32", "--images-per-sample", "0"])
    source = SyntheticSource(config)
    spec = CollateSpec.of(config, source)
    prompts = [source.sample(index) for index in range(2)]
    prompts = [replace(sample, tokens=sample.tokens[:20], trained=sample.trained[:20]) for sample in prompts]
    engine: Any = SimpleNamespace(
        groups=SimpleNamespace(coords=SimpleNamespace(dp=0), dims=SimpleNamespace(dp=1, pp=1, tp=1)),
        sequence_multiple=multiple,
        schedule=SimpleNamespace(logits=logits, backend=SimpleNamespace(device="cpu")),
    )
    return engine, spec, prompts
