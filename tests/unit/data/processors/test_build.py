"""Reading `preprocessor_config.json`: old spellings, defaults, and one line for what is not supported."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megavlm.data.processors import Layout, Processor, Prompt, processor_from
from megavlm.errors import UserError

CLIP: dict[str, Any] = {"image_processor_type": "CLIPImageProcessor", "size": 224, "crop_size": 224}
MODEL: dict[str, Any] = {"vision_config": {"patch_size": 14, "model_type": "clip_vision_model"}}
IDEFICS: dict[str, Any] = {"image_processor_type": "SmolVLMImageProcessor"}
QWEN: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessorFast"}


def layout(given: dict[str, Any], model: dict[str, Any] = MODEL, size: tuple[int, int] = (300, 500)) -> Layout:
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
    assert layout(CLIP, {"model_type": "clip_vision_model", "patch_size": 32}).features == 7 * 7


def test_a_layout_knows_nothing_of_pixels() -> None:
    model = {"vision_config": {"patch_size": 14}, "downsample_ratio": 0.5}
    given = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 448, "width": 448}}
    found = layout(given, model, size=(480, 640))
    assert found.arrangement == (3, 4)
    assert len(found.tiles) == 13
    assert found.features == 13 * 256
    assert found.patches == 13 * 1024
    assert found.prompt == Prompt("<IMG_CONTEXT>", ("<img>", "</img>"), (13 * 256,))


def test_a_prompt_alternates_texts_and_runs() -> None:
    assert str(Prompt("*", ("a", "b", "c"), (2, 3))) == "a**b***c"


@pytest.mark.parametrize(
    ("given", "model", "says"),
    [
        ({}, MODEL, "'None' .*supported are CLIP"),
        ({"image_processor_type": "FuyuImageProcessor"}, MODEL, "'Fuyu' .*supported are CLIP"),
        ({**CLIP, "do_resize": False}, MODEL, "do_resize: false"),
        ({**CLIP, "do_rescale": False}, MODEL, "do_rescale: false"),
        ({**CLIP, "rescale_factor": 1 / 128}, MODEL, "rescale_factor"),
        ({**CLIP, "size": {"shortest_edge": 224, "longest_edge": 500}}, MODEL, "size .*longest_edge"),
        ({**CLIP, "crop_size": "224"}, MODEL, "crop_size '224'"),
        (CLIP, {"vision_config": {}}, "patch_size .*config.json"),
        (CLIP, {"vision_config": {"patch_size": [14, 16]}}, "patch_size .*config.json"),
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
        (
            {"image_processor_type": "LlavaOnevisionImageProcessor"},
            {**MODEL, "vision_aspect_ratio": "pad"},
            "vision_aspect_ratio 'pad'",
        ),
    ],
)
def test_what_is_not_supported_is_told_in_one_line(given: dict[str, Any], model: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as told:
        processor_from(given, model)
    assert "\n" not in str(told.value)
    assert re.search(says, str(told.value))


def test_a_processor_is_a_value() -> None:
    assert processor_from(CLIP, MODEL) == processor_from(CLIP, MODEL)
    assert isinstance(hash(processor_from(CLIP, MODEL)), int)
    assert isinstance(processor_from(CLIP, MODEL), Processor)
