"""Qwen2.5-VL and Qwen3-VL in and out: windows, M-RoPE, DeepStack; images of several sizes, several images, none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megavlm.checkpoint.hf.families import family_of
from megavlm.checkpoint.hf.settings import Settings
from tests.support import hf
from tests.support.harness import Single
from tools import convert

VOCABULARY, IMAGE_TOKEN = 61, 60
# (height, width) of each sample's images. With patches of 4 and windows of 16 pixels, 24 × 40 has windows of all four
# kinds; 8 × 8 is one feature; the last micro-batch has no image.
IMAGES = ((((24, 40), (8, 8)), ((32, 16),)), (((16, 16),), ()), ((), ()))
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 36,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 32,
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 59,
    "vision_start_token_id": 58,
    "vision_end_token_id": 57,
}


def qwen2_5(*, tied: bool = False) -> transformers.PreTrainedModel:
    config = transformers.Qwen2_5_VLConfig(
        vision_config={**VISION, "intermediate_size": 52, "window_size": 16, "fullatt_block_indexes": [1, 3]},
        text_config={
            **TEXT,
            "num_attention_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        tie_word_embeddings=tied,
        **TOKENS,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3(*, tied: bool = False) -> transformers.PreTrainedModel:
    config = transformers.Qwen3VLConfig(
        vision_config={
            **VISION,
            "intermediate_size": 52,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
        text_config={
            **TEXT,
            "num_attention_heads": 4,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 1]},
        },
        tie_word_embeddings=tied,
        **TOKENS,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


@pytest.mark.parametrize("build", [qwen2_5, qwen3])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_gradients_and_training(build: Any, tied: bool, single: Single, tmp_path: Path) -> None:
    theirs = build(tied=tied)
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, IMAGES)
    hf.assert_same_training(folder, theirs, single, IMAGES)


def test_settings_of_published_qwen2_5_checkpoints(tmp_path: Path) -> None:
    """Before Transformers 5, config.json had the language model's settings at the top."""
    folder = hf.save(qwen2_5(), tmp_path / "hf")
    nested = Settings(json.loads((folder / "config.json").read_text()), "config.json")
    flat = {**nested.values, **nested.values["text_config"], "model_type": "qwen2_5_vl"}
    rope = flat.pop("rope_parameters")
    del flat["text_config"]
    flat |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    family = family_of(nested)
    assert family.config(Settings(flat, "config.json")) == family.config(nested)


@pytest.mark.parametrize("build", [qwen2_5, qwen3])
def test_round_trip_and_generation(build: Any, tmp_path: Path) -> None:
    theirs = build()
    folder = hf.save(theirs, tmp_path / "hf", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    hf.assert_round_trip(folder, tmp_path)
    assert convert.main(["verify", str(folder), str(tmp_path / "ours"), "--samples", "1"]) == 0
    tokens = torch.tensor([[1, 5, *[IMAGE_TOKEN] * 6, 7, 9]])
    hf.assert_same_generation(
        folder,
        tmp_path,
        input_ids=tokens,
        mm_token_type_ids=(tokens == IMAGE_TOKEN).int(),
        image_grid_thw=torch.tensor([[1, 4, 6]]),
        pixel_values=torch.randn(24, 3 * 2 * 4 * 4),
    )
