"""What families say of a video's frames, where no clip is needed to see it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.families import processor_from
from megavlm.families.smolvlm import in_words
from megavlm.inputs.video import (
    Budget,
    Clip,
    Places,
    VideoProcessor,
    from_first_to_last,
    from_the_first,
    in_the_middle,
    rate_of,
    taken,
)

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


def regular(frames: int, rate: float) -> Clip:
    return Clip(48, 80, tuple(number / rate for number in range(frames)), rate)


@pytest.mark.parametrize(
    ("frames", "rate", "budget", "expected"),
    [
        (60, 30.0, Budget(), (0, 15, 30, 45)),  # two seconds: two frames each
        (75, 30.0, Budget(), (0, 18, 37, 56)),  # 2.5 seconds: 5 frames, rounded down to pairs
        (30, 30.0, Budget(), (0, 7, 15, 22)),  # at least four
        (3, 30.0, Budget(), (0, 1)),  # but no more than there are
        (1, 24.0, Budget(), (0,)),
        (600, 30.0, Budget(max_frames=5), (0, 150, 300, 450)),
        (40, 10.0, Budget(fps=20), tuple(range(40))),  # no frame twice
    ],
)
def test_frames_at_equal_intervals(frames: int, rate: float, budget: Budget, expected: tuple[int, ...]) -> None:
    assert taken(regular(frames, rate), budget, from_the_first, multiple=2) == expected


def test_frames_at_irregular_intervals_are_even_in_time() -> None:
    times = (*np.arange(0, 1, 0.01), *np.arange(1, 9))  # a hundred frames in the first second, one in each other
    clip = Clip(48, 80, times, rate_of(times, None))
    chosen = [times[number] for number in taken(clip, Budget(fps=1), from_the_first, multiple=2)]
    assert chosen == pytest.approx(range(8), abs=0.6)


@pytest.mark.parametrize(
    ("places", "expected"), [(from_the_first, (0, 3, 6)), (in_the_middle, (1, 5, 8)), (from_first_to_last, (0, 4, 9))]
)
def test_where_frames_are_taken(places: Places, expected: tuple[int, ...]) -> None:
    assert taken(regular(10, 10.0), Budget(fps=3, min_frames=1), places) == expected


def test_the_time_of_a_frame_is_its_number_unless_its_own_contradicts() -> None:
    rounded = Clip(48, 80, (0, 0.033, 0.067, 0.1), 30.0)
    assert [rounded.seconds(number) for number in range(4)] == [number / 30 for number in range(4)]
    irregular = Clip(48, 80, (0, 0.01, 0.02, 9), 1.0)
    assert [irregular.seconds(number) for number in range(4)] == [0, 0.01, 0.02, 9]


@pytest.mark.parametrize(
    ("times", "stated", "expected"),
    [
        ((0, 0.033, 0.067, 0.1), 30.0, 30.0),  # time stamps in milliseconds
        ((0, 1, 2, 3), 30.0, 1.0),  # a nominal rate
        ((0, 1, 2, 3), None, 1.0),
        ((0.0,), None, 24.0),
        ((0.0,), 30.0, 30.0),
    ],
)
def test_the_rate_is_the_stated_one_unless_frames_contradict(times: tuple, stated: float, expected: float) -> None:
    assert rate_of(times, stated) == pytest.approx(expected)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(0.001, 30), min_size=1, max_size=60),
    st.floats(0.01, 60),
    st.integers(1, 50),
    st.integers(1, 4),
    st.sampled_from([from_the_first, in_the_middle, from_first_to_last]),
)
def test_any_clip_gives_frames_within_the_budget(gaps, fps, most, multiple, places):
    times = tuple(np.cumsum([0.0, *gaps]).tolist())
    clip = Clip(48, 80, times, rate_of(times, None))
    chosen = taken(clip, Budget(fps=fps, max_frames=most), places, multiple=multiple)
    assert 1 <= len(chosen) <= max(1, min(most, len(times)))
    assert all(before < after for before, after in pairwise(chosen))
    assert chosen[-1] < len(times)
