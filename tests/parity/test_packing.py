"""Samples that share a sequence have the losses and gradients that they have alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megavlm.arch.layers import layer_names
from megavlm.config.schema import Config, DataConfig, ProjectorConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.model.weights import initialize
from tests.support.harness import Single
from tests.support.tiny_vlm import VOCABULARY, base, samples_of, trained


def tiled(config: Config) -> Config:
    return replace(
        config,
        model=replace(config.model, projector=ProjectorConfig(anyres_max_tiles=4)),
        data=DataConfig(images_per_sample=(1, 0), image_sizes=(16, 32)),
    )


def masked(config: Config) -> Config:
    """Images of up to nine tokens attend both ways, in a window of as many and without one."""
    language = replace(config.model.language, bidirectional_images=True)
    return replace(config, model=replace(config.model, language=language, image_token=VOCABULARY - 1))


def merged(config: Config) -> Config:
    """Images of one, four and nine blocks that a convolution merges, into a gated projector."""
    projector = ProjectorConfig(
        kind="gated", hidden_size=40, pixel_shuffle=2, merge="convolution", merge_channels=20, merge_bias=True,
        input_norm=True, norm_before_merge=True,
    )  # fmt: skip
    return replace(config, model=replace(config.model, projector=projector))


CONFIGS = {
    "one axis": base(),
    "M-RoPE": base(mrope_section=(2, 2, 2)),
    "DeepStack": replace(
        base(), model=replace(base().model, vision=replace(base().model.vision, deepstack_layers=(0,)))
    ),
    "masks": masked(base(window_size=9, full_attention_layers=(1,), local_rotary_base=100.0)),
    "tiled": tiled(base()),
    "merged": merged(base(mrope_section=(1, 1, 1), rotary_percent=0.5, rotary_interleaved=True, post_norms=True)),
    "latents": base(kv_lora_rank=20, num_query_groups=4, kv_channels=14, qk_pos_emb_head_dim=6, v_head_dim=10),
    "further tokens": base(mrope_section=(2, 2, 2), mtp_layers=2),
    "recomputed": replace(base(), execution=replace(base().execution, recompute_granularity="full")),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [((0, 1, 2, 3),), ((0, 1), (3, 2))], ids=["one row", "two rows"])
def test_a_packed_batch_trains_as_its_samples_do(name: str, rows: tuple[tuple[int, ...], ...], single: Single) -> None:
    config = CONFIGS[name]
    chunk = single.chunk(config, layer_names(config.model), vocab_size=VOCABULARY)
    initialize(chunk, config, vocab_size=VOCABULARY)
    source, samples = samples_of(config, (140, 132, 125, 140))
    if depths := config.model.language.mtp_layers:  # also the first tokens of a sample, to which no other may look
        samples = [replace(sample, trained=np.ones_like(sample.trained)) for sample in samples]
    packed = collate([[samples[i] for i in row] for row in rows], CollateSpec.of(config, source, seq_length=560))
    alone = [collate([[sample]], CollateSpec.of(config, source, seq_length=144)) for sample in samples]
    loss, gradients = trained(chunk, [packed], depths=depths)
    expected_loss, expected = trained(chunk, alone, depths=depths)
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
    packed = collate([[samples[0], samples[1]]], CollateSpec.of(config, source, seq_length=192))
    crossing = replace(packed, text=replace(packed.text, cu_seqlens=None))
    assert abs(trained(chunk, [packed])[0] - trained(chunk, [crossing])[0]) > 1e-3
