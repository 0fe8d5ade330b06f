"""LLaVA-1.5 in and out: CLIP or SigLIP towers, Llama and Mistral, tied and untied, old and new spellings of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support import hf
from tests.support.harness import Single
from tools import convert

TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 59,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
}
IMAGES = ([[(32, 32), (32, 32)], []], [[], []], [[(32, 32)], [(32, 32)]])


def vicuna() -> transformers.LlavaConfig:
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, hidden_act="quick_gelu"),
        text_config=transformers.LlamaConfig(**TEXT, rms_norm_eps=1e-5),
        image_token_index=60,
    )


def mistral_tied() -> transformers.LlavaConfig:
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.MistralConfig(**TEXT, head_dim=16, sliding_window=None),
        image_token_index=60,
        tie_word_embeddings=True,
        vision_feature_layer=-1,
    )


def llama3_siglip() -> transformers.LlavaConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    return transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT, rope_parameters=rope),
        image_token_index=60,
        vision_feature_select_strategy="full",
        multimodal_projector_bias=False,
    )


@pytest.mark.parametrize("build", [vicuna, mistral_tied, llama3_siglip])
def test_llava(build: Any, single: Single, tmp_path: Path) -> None:
    theirs = transformers.LlavaForConditionalGeneration(build())
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, IMAGES)
    hf.assert_same_training(folder, theirs, single, IMAGES)


def test_round_trip_and_generation(tmp_path: Path) -> None:
    folder = hf.save(transformers.LlavaForConditionalGeneration(vicuna()), tmp_path / "hf")
    hf.assert_round_trip(folder, tmp_path)
    tokens = torch.tensor([[1, 5, *[60] * 16, 7, 9]])
    hf.assert_same_generation(folder, tmp_path, input_ids=tokens, pixel_values=torch.randn(1, 3, 32, 32))


def as_before_transformers_5(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def as_in_memory(name: str) -> str:
    if name.endswith("lm_head.weight"):
        return "lm_head.weight"
    return "model." + name.replace("language_model.model.", "language_model.")


@pytest.mark.parametrize("old", [as_before_transformers_5, as_in_memory])
def test_other_spellings_come_back_as_they_were(old: Any, tmp_path: Path) -> None:
    folder = hf.save(transformers.LlavaForConditionalGeneration(vicuna()), tmp_path / "hf")
    weights = {old(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    hf.assert_round_trip(folder, tmp_path)


def test_a_tied_output_layer_may_be_in_the_file_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = hf.save(transformers.LlavaForConditionalGeneration(mistral_tied()), tmp_path / "hf")
    weights = load_file(folder / "model.safetensors")
    head, embedding = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
    assert head not in weights
    weights[head] = weights[embedding].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    hf.assert_round_trip(folder, tmp_path)
    weights[head][3, 5] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert convert.main(["import", str(folder), str(tmp_path / "differing")]) == 2
    assert f"{head} differs from {embedding}, to which tie_word_embeddings ties it" in capsys.readouterr().err
