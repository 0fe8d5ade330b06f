"""LLaVA-1.5 in and out: CLIP or SigLIP towers, Llama and Mistral, tied and untied, old and new spellings of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megavlm.programs import convert
from tests.support import hf
from tests.support.harness import Single
from tests.support.tiny_models.llava import IMAGES, llama3_siglip, mistral_tied, vicuna


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
