"""SmolVLM and Idefics3 in and out: positions by bucket, pixel shuffle without biases, Llama tied and untied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

from megavlm.model.vision import position_buckets
from tests.support import hf
from tests.support.harness import Single
from tests.support.tiny_models.smolvlm import IMAGES, idefics3, smolvlm


@pytest.mark.parametrize("build", [smolvlm, idefics3])
def test_logits_gradients_and_training(build: Any, single: Single, tmp_path: Path) -> None:
    theirs = build()
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, IMAGES)
    hf.assert_same_training(folder, theirs, single, IMAGES)


def test_round_trip_and_generation(tmp_path: Path) -> None:
    folder = hf.save(smolvlm(), tmp_path / "hf", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    hf.assert_round_trip(folder, tmp_path)
    tokens = torch.tensor([[1, 5, *[60] * 9, 7, 9]])
    hf.assert_same_generation(folder, tmp_path, input_ids=tokens, pixel_values=torch.randn(1, 1, 3, 26, 26))


@pytest.mark.parametrize("side", [6, 19, 27])
def test_buckets_round_as_the_reference(side: int) -> None:
    """An embedding whose positions are their own numbers shows which one each patch takes; 19 needs equal rounding."""
    config = transformers.SmolVLMConfig(
        vision_config={"hidden_size": 1, "num_channels": 1, "image_size": side, "patch_size": 1}
    ).vision_config
    embeddings = SmolVLMVisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(side * side)[:, None])
        for rows, columns in ((side, side), (1, 2 * side), (side + 5, side - 3), (31, 38)):
            mask = torch.ones(1, rows, columns, dtype=torch.bool)
            theirs = embeddings(torch.zeros(1, 1, rows, columns), mask).view(rows, columns)
            ours = position_buckets(rows, side)[:, None] * side + position_buckets(columns, side)
            assert torch.equal(ours.float(), theirs)
