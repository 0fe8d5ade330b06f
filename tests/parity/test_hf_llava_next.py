"""LLaVA-NeXT in and out: LLaVA's weights and a newline, tiles of which none is reduced, each image tiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megavlm.arch.kinds import model_parameters
from megavlm.arch.layers import layer_names
from megavlm.errors import UserError
from megavlm.families import PUBLISHED, processor_from, published_model
from tests.support import hf
from tests.support.harness import Single
from tests.support.processors import model_of
from tests.support.tiny_models.llava_next import IMAGES, llava_next


@pytest.mark.parametrize("tied", [False, True])
def test_logits_gradients_and_training(tied: bool, single: Single, tmp_path: Path) -> None:
    theirs = llava_next(tied=tied)
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, IMAGES)
    hf.assert_same_training(folder, theirs, single, IMAGES)


def test_round_trip(tmp_path: Path) -> None:
    folder = hf.save(llava_next(), tmp_path / "hf", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    hf.assert_round_trip(folder, tmp_path)


def test_the_published_size_has_the_parameters_of_transformers() -> None:
    """But for the last layer of the tower, which no feature comes from, and the norm of the class token."""
    _, values = PUBLISHED["llava_next_mistral_7b"]
    model = published_model("llava_next_mistral_7b")
    with torch.device("meta"):
        theirs: Any = transformers.LlavaNextForConditionalGeneration(
            transformers.LlavaNextConfig(
                text_config=transformers.MistralConfig(**values["text_config"]),
                vision_config=transformers.CLIPVisionConfig(**values["vision_config"]),
            )
        )
    tower = theirs.model.vision_tower
    idle = sum(p.numel() for part in (tower.encoder.layers[-1], tower.post_layernorm) for p in part.parameters())
    found = sum(model_parameters(layer, model) for layer in layer_names(model))
    assert found == theirs.num_parameters() - idle


def test_an_image_among_others_is_tiled_as_well() -> None:
    options = {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 336}}
    ours = processor_from({**options, "crop_size": {"height": 336, "width": 336}}, model_of(14, most=2**16))
    assert ours.layout(500, 600, images=3) == ours.layout(500, 600)
    assert len(ours.layout(500, 600).tiles) == 5
    with pytest.raises(UserError, match="crop_size"):
        processor_from(options, model_of(14, most=2**16))
