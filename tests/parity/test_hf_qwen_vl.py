"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL in and out: windows, M-RoPE, DeepStack; images of several sizes, several, none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megavlm.arch.kinds import model_parameters
from megavlm.arch.layers import layer_names
from megavlm.families import PUBLISHED, family_of, published_model
from megavlm.families.shared.settings import Settings
from megavlm.programs import convert
from tests.support import hf
from tests.support.harness import Single
from tests.support.tiny_models.qwen_vl import IMAGE_TOKEN, IMAGES, VIDEOS, qwen2, qwen2_5, qwen3


@pytest.mark.parametrize("build", [qwen2, qwen2_5, qwen3])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_gradients_and_training(build: Any, tied: bool, single: Single, tmp_path: Path) -> None:
    theirs = build(tied=tied)
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, IMAGES)
    hf.assert_same_training(folder, theirs, single, IMAGES)


@pytest.mark.parametrize("build", [qwen2, qwen2_5, qwen3])
def test_videos(build: Any, single: Single, tmp_path: Path) -> None:
    theirs = build()
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, VIDEOS)
    hf.assert_same_training(folder, theirs, single, VIDEOS)


@pytest.mark.parametrize(("build", "kind"), [(qwen2, "qwen2_vl"), (qwen2_5, "qwen2_5_vl")])
def test_settings_of_published_checkpoints(build: Any, kind: str, tmp_path: Path) -> None:
    """Before Transformers 5, config.json had the language model's settings at the top."""
    folder = hf.save(build(), tmp_path / "hf")
    nested = Settings(json.loads((folder / "config.json").read_text()), "config.json")
    flat = {**nested.values, **nested.values["text_config"], "model_type": kind}
    rope = flat.pop("rope_parameters")
    del flat["text_config"]
    flat |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    family = family_of(nested)
    assert family.config(Settings(flat, "config.json")) == family.config(nested)


@pytest.mark.parametrize("build", [qwen2, qwen2_5, qwen3])
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


def test_published_qwen2_vl_has_the_parameters_of_transformers() -> None:
    model = published_model("qwen2_vl_2b")
    with torch.device("meta"):
        theirs = transformers.Qwen2VLForConditionalGeneration(transformers.Qwen2VLConfig(**PUBLISHED["qwen2_vl_2b"][1]))
    theirs.tie_weights()
    assert sum(model_parameters(layer, model) for layer in layer_names(model)) == theirs.num_parameters()
