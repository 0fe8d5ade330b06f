"""What families say of a video's frames, where no clip is needed to see it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.families import processor_from
from megavlm.families.smolvlm import in_words
from megavlm.inputs.video import Clip, VideoProcessor

MODEL = ModelConfig(
    vision=VisionConfig(patch_size=14, temporal_patch_size=2), projector=ProjectorConfig(pixel_shuffle=2), video_token=9
)
SMOL = {"image_processor_type": "SmolVLMImageProcessor"}
LONG = Clip(48, 80, tuple(number / 10 for number in range(37_050)), 10.0)


def videos(model_type: str, **options: object) -> VideoProcessor | None:
    return processor_from(SMOL, MODEL, video=options, model_type=model_type).video


WORDS = {
    0: "zero",
    13: "thirteen",
    768: "seven hundred and sixty-eight",
    1001: "one thousand and one",
    262_144: "two hundred and sixty-two thousand, one hundred and forty-four",
}


def test_numbers_are_written_as_num2words_does() -> None:
    assert {number: in_words(number) for number in WORDS} == WORDS


def test_a_video_says_how_long_it_is_and_when_each_frame_is_shown() -> None:
    found = videos("smolvlm", max_image_size={"longest_edge": 28})
    layout = found.layout(LONG, found.usual)
    first, second, *_ = layout.prompt.texts
    assert "following series of sixty-four frames from a 1:01:45 [H:MM:SS] video.\n" in first
    assert "\nFrame from 00:01:<" in first, "not from the first second of a long video"
    assert "\nFrame from 00:59:<" in second
    assert layout.prompt.texts[-1] == "<fake_token_around_image>\n\n"
    assert layout.features == 64


@pytest.mark.parametrize("model_type", ["internvl", "smolvlm", "llava_onevision", "qwen3_vl"])
@pytest.mark.parametrize("tokens", [100, 37, 8, 5])
def test_a_budget_of_tokens_is_kept(model_type: str, tokens: int) -> None:
    sides = {"size": {"height": 28, "width": 28}}
    options = {
        "smolvlm": {"max_image_size": {"longest_edge": 28}},
        "qwen3_vl": {"patch_size": 14, "size": {"shortest_edge": 1, "longest_edge": 10**7}},
    }
    found = videos(model_type, **options.get(model_type, sides))
    for count in (1, 2, 5, 41):
        film = Clip(100, 130, tuple(number / 10 for number in range(count)), 10.0)
        layout = found.layout(film, replace(found.usual, fps=10.0, max_tokens=tokens))
        assert 1 <= len(layout.film.frames) <= count
        assert 1 <= layout.features <= tokens


def test_a_family_of_the_same_image_processor_without_videos() -> None:
    assert videos("idefics3") is None
    assert videos("llama") is None


def test_a_folder_says_how_many_frames_every_clip_gives() -> None:
    found = videos("internvl", size={"height": 28, "width": 28}, num_frames=3)
    texts = found.layout(LONG, found.usual).prompt.texts
    assert texts == ("Frame1: <img>", "</img>\nFrame2: <img>", "</img>\nFrame3: <img>", "</img>")
