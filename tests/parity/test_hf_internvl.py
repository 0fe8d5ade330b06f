"""InternVL in and out: both kinds of InternViT, pixel shuffle, Qwen2; sharded files with an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.internvl import InternVLVisionConfig

from tests.parity.test_hf_llava import IMAGES, TEXT
from tests.support import hf
from tests.support.harness import Single

VISION: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "image_size": [32, 32],
    "patch_size": [8, 8],
}


def small(**text: Any) -> transformers.InternVLConfig:
    """InternViT-300M's kind: LayerNorm, biases."""
    return transformers.InternVLConfig(
        vision_config=InternVLVisionConfig(**VISION, attention_bias=True),
        text_config=transformers.Qwen2Config(**TEXT, **text),
        image_token_id=60,
        tie_word_embeddings=False,
    )


def large() -> transformers.InternVLConfig:
    """InternViT-6B's kind: RMSNorm, normalised queries and keys, no biases there; a language model with tied ends."""
    return transformers.InternVLConfig(
        vision_config=InternVLVisionConfig(**VISION, norm_type="rms_norm", use_qk_norm=True),
        text_config=transformers.Qwen3Config(**TEXT, head_dim=12),
        image_token_id=60,
        tie_word_embeddings=True,
    )


@pytest.mark.parametrize("build", [small, large])
def test_internvl(build: Any, single: Single, tmp_path: Path) -> None:
    theirs = transformers.InternVLForConditionalGeneration(build())
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, IMAGES)
    hf.assert_same_training(folder, theirs, single, IMAGES)


def test_round_trip_of_several_files_and_generation(tmp_path: Path) -> None:
    theirs = transformers.InternVLForConditionalGeneration(small())
    folder = hf.save(theirs, tmp_path / "hf", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    hf.assert_round_trip(folder, tmp_path)
    tokens = torch.tensor([[1, 5, *[60] * 4, 7, 9]])
    hf.assert_same_generation(folder, tmp_path, input_ids=tokens, pixel_values=torch.randn(1, 3, 32, 32))
