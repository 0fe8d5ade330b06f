"""GLM-4.1V in and out: a part of each head rotates by neighbours, a norm before positions, a gated merger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil, smart_resize

from megavlm.arch.kinds import model_parameters
from megavlm.arch.layers import layer_names
from megavlm.errors import UserError
from megavlm.families import PUBLISHED, family_of, processor_from, published_model
from megavlm.families.shared.settings import Settings
from megavlm.inputs.bad_sample import BadSample
from tests.support import hf
from tests.support.harness import Single
from tests.support.processors import model_of, picture
from tests.support.tiny_models.glm4v import ROPE, glm4v
from tests.support.tiny_models.qwen_vl import IMAGES


@pytest.mark.parametrize("tied", [False, True])
def test_logits_gradients_and_training(tied: bool, single: Single, tmp_path: Path) -> None:
    theirs = glm4v(tied=tied)
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, IMAGES)
    hf.assert_same_training(folder, theirs, single, IMAGES)


def test_round_trip(tmp_path: Path) -> None:
    folder = hf.save(glm4v(), tmp_path / "hf", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    hf.assert_round_trip(folder, tmp_path)


def test_the_published_size_has_the_parameters_of_transformers() -> None:
    _, values = PUBLISHED["glm_4_1v_9b"]
    model = published_model("glm_4_1v_9b")
    with torch.device("meta"):
        theirs = transformers.Glm4vForConditionalGeneration(transformers.Glm4vConfig(**values))
    assert sum(model_parameters(layer, model) for layer in layer_names(model)) == theirs.num_parameters()


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_both_spellings_of_what_rotates(place: str) -> None:
    """Transformers 5 writes the share with the frequencies, files from before beside them."""
    inside = {name: value for name, value in ROPE.items() if place == "rope_parameters" or name == "mrope_section"}
    beside = {"rope_theta": 100.0, "partial_rotary_factor": 0.5} if place == "rope_scaling" else {}
    settings = Settings({"model_type": "glm4v", "text_config": {**beside, place: inside}}, "config.json")
    language = family_of(settings).config(settings).language
    assert (language.rotary_percent, language.rotary_base, language.mrope_section) == (0.5, 100.0, (1, 1, 1))


@pytest.mark.parametrize(
    ("section", "values"), [("vision_config", {"hidden_act": "gelu"}), ("vision_config", {"out_hidden_size": 2048})]
)
def test_what_would_be_computed_differently_is_refused(section: str, values: dict[str, Any]) -> None:
    settings = Settings({"model_type": "glm46v", section: values}, "config.json")
    with pytest.raises(UserError, match=next(iter(values))):
        family_of(settings).config(settings)


@pytest.mark.parametrize("size", [(60, 90), (97, 53), (300, 301), (28, 28), (1, 1), (1, 37), (19, 190), (3, 700)])
def test_sizes_and_patches(size: tuple[int, int]) -> None:
    """The same size and patches as Transformers' processor, for which an image is two frames."""
    theirs = Glm4vImageProcessorPil(size={"shortest_edge": 2 * 3137 + 1, "longest_edge": 2 * 60 * 28**2 + 1})
    ours = processor_from(theirs.to_dict(), model_of(14, merge=2, frames=2))
    try:
        smart_resize(2, *size, max_pixels=theirs.size["longest_edge"], min_pixels=theirs.size["shortest_edge"])
    except ValueError:
        with pytest.raises(BadSample):
            ours.layout(*size)
        return
    image = picture(*size)
    found = theirs(Image.fromarray(image))
    layout = ours.layout(*size)
    (grid,) = (tile.grid for tile in layout.tiles)
    assert [1, *grid] == found["image_grid_thw"][0].tolist()
    assert str(layout.prompt) == f"<|begin_of_image|>{'<|image|>' * (grid[0] * grid[1] // 4)}<|end_of_image|>"
    (mine,) = ours.tiles(image)
    blocks = mine.view(grid[0] // 2, 2, grid[1] // 2, 2, 3, 1, 196).transpose(1, 2).expand(-1, -1, -1, -1, -1, 2, -1)
    expected = torch.as_tensor(np.asarray(found["pixel_values"]))
    torch.testing.assert_close(blocks.reshape(expected.shape), expected, rtol=1e-5, atol=2e-6)
