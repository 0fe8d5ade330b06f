"""A VLM of two and two layers, and samples of given lengths for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megavlm.config.schema import Config, DataConfig, LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data.context_parts import with_further_tokens
from megavlm.data.synthetic import SyntheticSource
from megavlm.data.types import Sample
from megavlm.inputs.batch import MicroBatch
from megavlm.rules.defaults import resolve_model

VOCABULARY = 80


def base(**language: Any) -> Config:
    return Config(
        model=resolve_model(
            ModelConfig(
                vision=VisionConfig(num_layers=2, hidden_size=32, num_attention_heads=2, image_size=16, patch_size=4),
                projector=ProjectorConfig(pixel_shuffle=2),
                language=LanguageConfig(
                    num_layers=2,
                    hidden_size=48,
                    num_attention_heads=4,
                    vocab_size=VOCABULARY,
                    **{"num_query_groups": 2, **language},
                ),
            )
        ),
        data=DataConfig(images_per_sample=(1, 2, 0), image_sizes=(16, 24, 8)),
    )


def samples_of(config: Config, lengths: tuple[int, ...]) -> tuple[SyntheticSource, list[Sample]]:
    """Samples of these lengths: synthetic ones, cut before their end."""
    source = SyntheticSource(replace(config, train=replace(config.train, seq_length=max(lengths))))
    whole = [source.sample(index) for index in range(len(lengths))]
    return source, [
        replace(sample, tokens=sample.tokens[:length], trained=sample.trained[:length])
        for sample, length in zip(whole, lengths, strict=True)
    ]


def trained(
    chunk: Callable[..., Any], batches: list[MicroBatch], *, depths: int = 0
) -> tuple[float, dict[str, Tensor]]:
    """Summed loss over trained tokens and its gradients; with `depths`, also of as many further tokens each."""
    module: Any = chunk
    module.zero_grad(set_to_none=True)
    module.train()
    total = torch.zeros(())
    for batch in batches:
        module.set_input_tensor(None)
        batch = with_further_tokens(batch, depths)
        loss = (module(batch) * batch.text.loss_mask).sum()
        loss.backward()
        total = total + loss.detach()
    return float(total), {key: param.grad.clone() for key, param in module.named_parameters() if param.grad is not None}
