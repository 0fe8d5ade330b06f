"""Statistics of channels, and the image processor of a model that sees others than red, green and blue."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from PIL.Image import Resampling

from megavlm.config.registry import Entry, Extension, registry
from megavlm.config.schema import Config, DataConfig, ModelConfig, VisionConfig
from megavlm.data.preprocessors import processor_for
from megavlm.errors import UserError
from megavlm.inputs.resize import Pixels, resize
from megavlm.inputs.vision_inputs import Channels, VisionInput, channels_json, measured, read_channels
from megavlm.programs import channels

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
