"""Image processors, frames of videos, and channels: read from a folder's settings, or refused in one line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from PIL.Image import Resampling

from megavlm.config.registry import Entry, Extension, registry
from megavlm.config.schema import Config, DataConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data.preprocessors import processor_for
from megavlm.errors import UserError
from megavlm.families import family_of, processor_from
from megavlm.families.shared.settings import Settings
from megavlm.families.smolvlm import in_words
from megavlm.inputs.layout import Layout, Prompt
from megavlm.inputs.resize import Pixels, resize
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
from megavlm.inputs.vision_inputs import Channels, VisionInput, channels_json, measured, read_channels
from megavlm.programs import channels

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


SEEN_MODEL = ModelConfig(
    vision=VisionConfig(patch_size=14, temporal_patch_size=2), projector=ProjectorConfig(pixel_shuffle=2), video_token=9
)
SMOL = {"image_processor_type": "SmolVLMImageProcessor"}
LONG = Clip(48, 80, tuple(number / 10 for number in range(37_050)), 10.0)


def videos(model_type: str, **options: object) -> VideoProcessor | None:
    return processor_from(SMOL, SEEN_MODEL, video=options, model_type=model_type).video


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


@pytest.mark.parametrize("model_type", ["internvl", "smolvlm", "llava_onevision", "qwen3_vl", "gemma4"])
@pytest.mark.parametrize("tokens", [100, 37, 8, 5])
def test_a_budget_of_tokens_is_kept(model_type: str, tokens: int) -> None:
    sides = {"size": {"height": 28, "width": 28}}
    options = {
        "smolvlm": {"max_image_size": {"longest_edge": 28}},
        "gemma4": {"patch_size": 14, "pooling_kernel_size": 2},
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


SUM: VisionInput | None = None  # set by `made`
RNG = np.random.default_rng(0)


def config(channel_count: int, **data: str) -> Config:
    vision = VisionConfig(in_channels=channel_count, image_size=16, patch_size=8)
    return Config(model=ModelConfig(vision=vision), data=DataConfig(kind="files", **data))


def test_statistics_are_those_of_all_pixels_together() -> None:
    images = [RNG.normal(1e6, [1, 2, 0], (height, 7, 3)) for height in (3, 5, 40)]
    every = np.concatenate([each.reshape(-1, 3) for each in images])
    found = measured(iter(images))
    np.testing.assert_allclose(found.mean, every.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.std[:2], every.std(axis=0)[:2], rtol=1e-9)
    assert found.std[2] == 1, "a channel that is the same everywhere is not divided by zero"


def test_the_command_measures_what_training_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = [RNG.normal(5, 3, (9, 6, 5)).astype(np.float32) for _ in range(4)]
    lines = []
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
        turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "That."}]
        lines.append(json.dumps({"image": f"{number}.npy", "conversations": turns}))
    lines.append(json.dumps({"image": "none.npy", "conversations": turns}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    out = tmp_path / "channels.json"
    assert channels.main([str(tmp_path / "train.jsonl"), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "5 channels, 1 images could not be read" in told
    assert f"--vision-input array --set model.vision.in_channels=5 --channel-statistics {out}" in told

    processor = processor_for(config(5, vision_input="array", channel_statistics=str(out)))
    whole = replace(processor, size=None)  # no resizing
    seen = torch.stack([whole.tiles(array[:8, :])[0] for array in (each.repeat(2, 1)[:, :8] for each in arrays)])
    assert seen.shape == (4, 1, 5 * 64)
    every = np.concatenate([array.reshape(-1, 5) for array in arrays])
    expected = ((arrays[0].repeat(2, 1)[:8, :8] - every.mean(0)) / every.std(0)).transpose(2, 0, 1)
    np.testing.assert_allclose(seen[0, 0], expected.flatten(), rtol=1e-5, atol=1e-6)


def test_arrays_are_resized_and_padded_as_numbers(tmp_path: Path) -> None:
    """Resized as Pillow resizes one channel of floats; padded with the mean, which becomes zero."""
    (tmp_path / "channels.json").write_text(channels_json("array", Channels((100.0, 2e4), (10.0, 1e3))))
    given = config(2, vision_input="array", channel_statistics=str(tmp_path / "channels.json"))
    processor = processor_for(given)
    array = RNG.normal((100, 2e4), (10, 1e3), (12, 24, 2)).astype(np.float32)
    (view,) = processor.views(array)
    for channel in range(2):
        expected = Image.fromarray(array[..., channel]).resize((16, 16), Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(view[..., channel], np.asarray(expected))
    padded = replace(processor, pad_to_square=True, size=None)
    (view,) = padded.views(array)
    assert view.shape == (24, 24, 2)
    patches = padded.tiles(array)[0].view(3, 3, 2, 8, 8)
    assert patches[0, :, :, :6].abs().max() < 1e-4
    assert patches[1].abs().max() > 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A vision input that somebody brings: red, green, blue, and their sum."""
    monkeypatch.setattr(sys.modules[__name__], "SUM", VisionInput("sum", with_sum, Channels((0.0,) * 4, (1.0,) * 4)))
    registry()["mine"] = Extension(inputs=(Entry("sum", f"{__name__}:SUM"),))
    yield
    del registry()["mine"]


def with_sum(tile: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.concatenate([tile, tile.sum(-1, keepdims=True)], axis=-1).astype(np.float32)


def test_channels_are_made_of_resized_tiles(made: None) -> None:
    processor = processor_for(config(4, vision_input="sum"))
    photo = RNG.integers(0, 256, (40, 30, 3)).astype(np.uint8)
    (view,) = processor.views(photo)
    patches = processor.tiles(photo)[0].view(-1, 4, 64)
    assert torch.equal(patches[:, :3].sum(1), patches[:, 3])
    assert patches[0, 0, 0] == view[0, 0, 0]


@pytest.mark.parametrize(
    ("count", "data", "words"),
    [
        (5, {}, "model.vision.in_channels 5: photos have 3 channels: .*--vision-input array"),
        (5, {"vision_input": "aray"}, "--vision-input aray is not known: did you mean array?"),
        (5, {"vision_input": "array"}, "needs the means and deviations.*megavlm channels.*--channel-statistics"),
        (5, {"vision_input": "array", "channel_statistics": "none.json"}, "none.json is not there: .*megavlm channels"),
        (4, {"vision_input": "rgb"}, "model.vision.in_channels 4: photos have 3 channels"),
    ],
)
def test_what_does_not_fit_is_refused(count: int, data: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        processor_for(config(count, **data))


def test_statistics_of_other_channels_are_refused(tmp_path: Path, made: None) -> None:
    file = tmp_path / "channels.json"
    file.write_text(channels_json("array", Channels((0.0, 0.0), (1.0, 1.0))))
    with pytest.raises(UserError, match=r"is of 2 channels and the model has 5: set model.vision.in_channels 2"):
        processor_for(config(5, vision_input="array", channel_statistics=str(file)))
    with pytest.raises(UserError, match=r"--vision-input sum makes 4 channels and the model has 5"):
        processor_for(config(5, vision_input="sum"))
    for values, words in (
        ({"mean": [1, 2], "std": [1]}, "2 means and 1 deviations"),
        ({"mean": [1], "std": [0]}, "std"),
        ({"mean": "1", "std": [1]}, "mean"),
        ({}, "0 means"),
    ):
        file.write_text(json.dumps(values))
        with pytest.raises(UserError, match=words):
            read_channels(file)


sides = st.integers(1, 90)


def difference(pixels: Pixels, height: int, width: int, resample: Resampling, *, fast: bool = True) -> np.ndarray:
    ours = resize(pixels, height, width, resample, fast=fast)
    theirs = np.asarray(Image.fromarray(pixels).resize((width, height), resample))
    assert ours.dtype == np.uint8
    assert ours.shape == (height, width, 3)
    return np.abs(ours.astype(int) - theirs)


@settings(max_examples=250, deadline=None)
@given(
    old=st.tuples(sides, sides),
    new=st.tuples(sides, sides),
    resample=st.sampled_from([Resampling.BILINEAR, Resampling.BICUBIC, Resampling.LANCZOS, Resampling.BOX]),
    seed=st.integers(0, 99),
)
def test_noise(old: tuple[int, int], new: tuple[int, int], resample: Resampling, seed: int) -> None:
    """A wrong order of the axes would show here: it is worth tens of grey levels."""
    noise = np.random.default_rng(seed).integers(0, 256, (*old, 3), dtype=np.uint8)
    assert difference(noise, *new, resample).max() <= 2
    assert difference(noise, *new, resample, fast=False).max() == 0


@pytest.mark.parametrize("new", [(224, 224), (336, 448), (384, 384), (700, 500)])
def test_of_a_photograph_over_99_percent_are_equal(new: tuple[int, int]) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    photograph = np.ascontiguousarray(datasets.load_sample_image("china.jpg"))
    found = difference(photograph, *new, Resampling.BICUBIC)
    assert (found > 0).mean() < 0.01
    assert (found > 1).mean() < 5e-5
    assert found.max() <= 2
