"""Pixtral in and out: a tower without biases, rotary frequencies that rows and columns share out, marks after rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers.models.pixtral import image_processing_pil_pixtral as pil

from megavlm.errors import UserError
from megavlm.families import family_of, processor_from
from megavlm.families.shared.settings import Settings
from megavlm.inputs.bad_sample import BadSample, Reason
from tests.support import hf
from tests.support.harness import Single
from tests.support.processors import bare, model_of, picture, pixtral_processor
from tests.support.tiny_models.pixtral import IMAGES, VISION, pixtral


@pytest.mark.parametrize("tied", [False, True])
def test_logits_gradients_and_training(tied: bool, single: Single, tmp_path: Path) -> None:
    theirs = pixtral(tied=tied)
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, IMAGES)
    hf.assert_same_training(folder, theirs, single, IMAGES)


def test_round_trip(tmp_path: Path) -> None:
    folder = hf.save(pixtral(), tmp_path / "hf", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    hf.assert_round_trip(folder, tmp_path)


def test_no_window_is_no_limit() -> None:
    """`"sliding_window": null` is what Pixtral's config.json says; Mistral's own default would be 4,096 tokens."""
    text = {"model_type": "mistral", "sliding_window": None, "max_position_embeddings": 1024000}
    values = {"model_type": "llava", "vision_config": {**VISION, "model_type": "pixtral"}, "text_config": text}
    values |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    settings = Settings(values, "config.json")
    assert family_of(settings).name == "pixtral"
    assert family_of(settings).config(settings).language.max_positions == 1024000


def test_a_gelu_tower_is_refused() -> None:
    settings = Settings({"model_type": "llava", "vision_config": {"model_type": "pixtral"}}, "config.json")
    settings.values["vision_config"]["hidden_act"] = "gelu"
    with pytest.raises(UserError, match="hidden_act"):
        family_of(settings).config(settings)


@pytest.mark.parametrize("size", [(60, 80), (97, 53), (200, 200), (28, 28), (1, 1), (1, 37), (19, 190)])
@pytest.mark.parametrize("merge", [1, 2])
def test_tiles_and_prompts(size: tuple[int, int], merge: int) -> None:
    """An image gets the size, patches and prompt text that Transformers' processor gives it."""
    patch = 4
    theirs = pil.PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size=patch * merge)
    ours = processor_from(theirs.to_dict(), model_of(patch, merge=merge))
    whole = bare(
        pixtral_processor(),
        patch_size=patch,
        spatial_merge_size=merge,
        image_token="[IMG]",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    image = picture(*size)
    pixels = theirs(Image.fromarray(image))
    layout = ours.layout(*size)
    assert str(layout.prompt) == whole.replace_image_token(pixels, 0)
    assert layout.features == str(layout.prompt).count("[IMG]")
    (mine,) = ours.tiles(image)
    expected = torch.nn.functional.unfold(torch.as_tensor(pixels["pixel_values"][0])[None], patch, stride=patch)
    torch.testing.assert_close(mine, expected[0].T, rtol=1e-5, atol=2e-6)


def test_an_image_that_shrinks_to_nothing_is_left_out() -> None:
    ours = processor_from({"image_processor_type": "PixtralImageProcessor"}, model_of(16))
    with pytest.raises(BadSample) as caught:
        ours.layout(1, 3000)
    assert caught.value.reason is Reason.TOO_NARROW
