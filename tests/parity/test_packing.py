"""Samples that share a sequence have the losses and gradients that they have alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.config.schema import Config, DataConfig, LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data.batch import MicroBatch
from megavlm.data.sample import Sample
from megavlm.data.source import batch_of, batch_of_rows
from megavlm.data.synthetic import SyntheticSource
from megavlm.model.weights import initialize
from megavlm.planner.layers import layer_names
from tests.support.harness import Single

VOCABULARY = 80


def base(**language: Any) -> Config:
    return Config(
        model=ModelConfig(
            vision=VisionConfig(num_layers=2, hidden_size=32, num_attention_heads=2, image_size=16, patch_size=4),
            projector=ProjectorConfig(pixel_shuffle=2),
            language=LanguageConfig(
                num_layers=2,
                hidden_size=48,
                num_attention_heads=4,
                num_query_groups=2,
                vocab_size=VOCABULARY,
                **language,
            ),
        ),
        data=DataConfig(images_per_sample=(1, 2, 0), image_sizes=(16, 24, 8)),
    )


def tiled(config: Config) -> Config:
    return replace(
        config,
        model=replace(config.model, projector=ProjectorConfig(anyres_max_tiles=4)),
        data=DataConfig(images_per_sample=(1, 0), image_sizes=(16, 32)),
    )


CONFIGS = {
    "one axis": base(),
    "M-RoPE": base(mrope_section=(2, 2, 2)),
    "DeepStack": replace(
        base(), model=replace(base().model, vision=replace(base().model.vision, deepstack_layers=(0,)))
    ),
    "tiled": tiled(base()),
    "recomputed": replace(base(), train=replace(base().train, recompute_granularity="full")),
}


def samples_of(config: Config, lengths: tuple[int, ...]) -> tuple[SyntheticSource, list[Sample]]:
    """Samples of these lengths: synthetic ones, cut before their end."""
    source = SyntheticSource(replace(config, train=replace(config.train, seq_length=max(lengths))))
    whole = [source.sample(index) for index in range(len(lengths))]
    return source, [
        replace(sample, tokens=sample.tokens[:length], trained=sample.trained[:length])
        for sample, length in zip(whole, lengths, strict=True)
    ]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [((0, 1, 2, 3),), ((0, 1), (3, 2))], ids=["one row", "two rows"])
def test_a_packed_batch_trains_as_its_samples_do(name: str, rows: tuple[tuple[int, ...], ...], single: Single) -> None:
    config = CONFIGS[name]
    chunk = single.chunk(config, layer_names(config.model), vocab_size=VOCABULARY)
    initialize(chunk, config, vocab_size=VOCABULARY)
    source, samples = samples_of(config, (140, 132, 125, 140))
    packed = batch_of_rows(source, [[samples[i] for i in row] for row in rows], seq_length=560, with_patches=True)
    assert packed.cu_seqlens is not None
    alone = [batch_of(source, [sample], seq_length=144, with_patches=True) for sample in samples]
    loss, gradients = trained(chunk, [packed])
    expected_loss, expected = trained(chunk, alone)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for key, gradient in expected.items():
        scale = max(gradient.abs().max().item(), 1e-8)
        assert (gradients[key] - gradient).abs().max().item() <= 1e-5 * scale, key


def test_a_neighbour_changes_nothing(single: Single) -> None:
    """The test above would pass if attention crossed samples and the model ignored it: it does not."""
    config = CONFIGS["one axis"]
    chunk = single.chunk(config, layer_names(config.model), vocab_size=VOCABULARY)
    initialize(chunk, config, vocab_size=VOCABULARY)
    source, samples = samples_of(config, (90, 85))
    rows = [[samples[0], samples[1]]]
    packed = batch_of_rows(source, rows, seq_length=192, with_patches=True)
    crossing = replace(packed, cu_seqlens=None)
    assert abs(trained(chunk, [packed])[0] - trained(chunk, [crossing])[0]) > 1e-3


def trained(chunk: Callable[..., Any], batches: list[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
    """Summed loss over trained tokens and its gradients."""
    module: Any = chunk
    module.zero_grad(set_to_none=True)
    module.train()
    total = torch.zeros(())
    for batch in batches:
        module.set_input_tensor(None)
        loss = (module(batch) * batch.loss_mask).sum()
        loss.backward()
        total = total + loss.detach()
    return float(total), {key: param.grad.clone() for key, param in module.named_parameters() if param.grad is not None}
