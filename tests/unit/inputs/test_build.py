"""Reading `preprocessor_config.json`: old spellings, defaults, and one line for what is not supported."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.errors import UserError
from megavlm.families import family_of, processor_from
from megavlm.families.shared.settings import Settings
from megavlm.inputs.layout import Layout, Prompt

CLIP: dict[str, Any] = {"image_processor_type": "CLIPImageProcessor", "size": 224, "crop_size": 224}
MODEL = ModelConfig(vision=VisionConfig(patch_size=14))
MERGED = ModelConfig(vision=VisionConfig(patch_size=14), projector=ProjectorConfig(pixel_shuffle=2))
IDEFICS: dict[str, Any] = {"image_processor_type": "SmolVLMImageProcessor"}
QWEN: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessorFast"}


def layout(given: dict[str, Any], model: ModelConfig = MODEL, size: tuple[int, int] = (300, 500)) -> Layout:
    return processor_from(given, model).layout(*size)


@pytest.mark.parametrize(
    "given",
    [
        CLIP,
        {"feature_extractor_type": "CLIPFeatureExtractor", "size": 224, "crop_size": 224},
        {"image_processor_type": "CLIPImageProcessorFast", "size": {"shortest_edge": 224}},
        {"image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 224, "width": 224}},
        {"processor_class": "LlavaProcessor", "image_processor": CLIP},
    ],
)
def test_spellings_of_one_processor(given: dict[str, Any]) -> None:
    assert layout(given).features == 16 * 16


def test_a_tower_alone_has_its_patch_size_at_the_top() -> None:
    model = family_of(settings := Settings({"model_type": "clip_vision_model", "patch_size": 32}, "")).config(settings)
    assert layout(CLIP, model).features == 7 * 7


def test_a_layout_knows_nothing_of_pixels() -> None:
    given = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 448, "width": 448}}
    found = layout(given, MERGED, size=(480, 640))
    assert found.arrangement == (3, 4)
    assert len(found.tiles) == 13
    assert found.features == 13 * 256
    assert found.patches == 13 * 1024
    assert found.prompt == Prompt("<IMG_CONTEXT>", ("<img>", "</img>"), (13 * 256,))


@pytest.mark.parametrize(
    ("given", "model", "says"),
    [
        ({}, MODEL, "'None' .*supported are .*CLIP"),
        ({"image_processor_type": "FuyuImageProcessor"}, MODEL, "'Fuyu' .*supported are .*CLIP"),
        ({**CLIP, "do_resize": False}, MODEL, "do_resize: false"),
        ({**CLIP, "do_rescale": False}, MODEL, "do_rescale: false"),
        ({**CLIP, "rescale_factor": 1 / 128}, MODEL, "rescale_factor"),
        ({**CLIP, "size": {"shortest_edge": 224, "longest_edge": 500}}, MODEL, "size .*longest_edge"),
        ({**CLIP, "crop_size": "224"}, MODEL, "crop_size '224'"),
        ({**IDEFICS, "size": {"height": 64, "width": 64}}, MODEL, "longest_edge"),
        ({**QWEN, "patch_size": 16}, MODEL, "patch_size 16 .*14 in config.json"),
        ({**QWEN, "size": {"height": 64, "width": 64}}, MODEL, "shortest_edge and longest_edge"),
        (
            {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 384, "width": 448}},
            MODEL,
            "square",
        ),
        (
            {"image_processor_type": "LlavaOnevisionImageProcessor", "image_grid_pinpoints": [[384, 500]]},
            MODEL,
            "image_grid_pinpoints",
        ),
    ],
)
def test_what_is_not_supported_is_told_in_one_line(given: dict[str, Any], model: ModelConfig, says: str) -> None:
    with pytest.raises(UserError) as told:
        processor_from(given, model)
    assert "\n" not in str(told.value)
    assert re.search(says, str(told.value))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "clip_vision_model", "patch_size": [14, 16]}, "config.json: patch_size = .*square"),
        (
            {"model_type": "llava_onevision", "vision_config": {"model_type": "siglip_vision_model"}}
            | {"vision_aspect_ratio": "pad"},
            "vision_aspect_ratio = 'pad'",
        ),
    ],
)
def test_what_no_processor_can_make_of_a_model_is_told_in_one_line(config: dict[str, Any], says: str) -> None:
    settings = Settings(config, "config.json")
    with pytest.raises(UserError, match=says) as told:
        family_of(settings).config(settings)
    assert "\n" not in str(told.value)
