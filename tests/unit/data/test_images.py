"""Pictures: altered in training, and cut as processors do, from files of data sets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from megavlm.command_line.parsing import parse
from megavlm.config.schema import CheckpointConfig, Config, DataConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data.file_source import FilesSource
from megavlm.data.preprocessors import processor_for, tokenizer_for
from megavlm.data.types import HeldOut, SampleId, Segment
from megavlm.errors import UserError
from megavlm.inputs.patches import patchify
from tests.support.data_files import record, sources_of, write_all
from tests.support.tokenizers import SPECIALS, byte_level, llama
from tests.support.training import SMALL


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    patch_size=st.sampled_from([1, 2, 7]),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_a_linear_layer_on_patches_is_the_convolution(rows, columns, patch_size, channels, seed):
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, size=(rows * patch_size, columns * patch_size, channels), dtype=np.uint8)
    weight = torch.from_numpy(rng.standard_normal((5, channels, patch_size, patch_size)))
    normalised = (torch.from_numpy(image).permute(2, 0, 1).double() / 255 - 0.5) / 0.5

    expected = torch.nn.functional.conv2d(normalised[None], weight, stride=patch_size)[0]  # [5, rows, columns]
    patches = patchify(image, patch_size)
    assert patches.dtype == torch.float32
    assert patches.shape == (rows * columns, channels * patch_size**2)
    torch.testing.assert_close(patches.double() @ weight.flatten(1).T, expected.flatten(1).T, rtol=1e-5, atol=1e-5)


def test_mean_and_std_normalise_the_unit_interval() -> None:
    image = np.array([[[0], [255]]], dtype=np.uint8)
    torch.testing.assert_close(patchify(image, 1, mean=0.25, std=0.1), torch.tensor([[-2.5], [7.5]]))


BOTH = "data.augment_crop=0.5 data.augment_color=0.4".split()


def test_images_change_with_the_epoch_and_with_nothing_else(tmp_path: Path) -> None:
    folder = write_all(tmp_path, samples=2)
    names = sorted(path.name for path in (folder / "images").iterdir())
    lines = [
        record("<image>\nwhat is this ?", image=names[0]),
        record("<image>\nis [1, 2, 30, 40] red ?", image=names[0]),
    ]
    (folder / "train.jsonl").write_text("\n".join(lines))

    def source(*options: str) -> FilesSource:
        data = [*sources_of(folder)[:2], *sources_of(folder)[-2:], "--no-shuffle", "--num-workers", "0"]
        data += ["--validation", data[1]]
        return FilesSource(parse([*SMALL, *data, *(["--set", *options] if options else [])]))

    def patches(made: FilesSource, sample: SampleId) -> Tensor:
        [encoded] = made.encode(sample).samples
        return made.load(Segment(sample, encoded)).images[0].patches()

    plain, cropped, both = source(), source("data.augment_crop=0.5"), source(*BOTH)
    assert torch.equal(patches(both, 0), patches(source(*BOTH), 0))
    assert patches(both, 0).shape == patches(plain, 0).shape
    for changed in (cropped, both):
        assert not torch.equal(patches(changed, 0), patches(plain, 0))
        assert not torch.equal(patches(changed, 0), patches(changed, 2)), "the same record in the next epoch"
    assert torch.equal(patches(plain, 0), patches(plain, 2))
    assert torch.equal(patches(cropped, 1), patches(plain, 1)), "its text has a box"
    assert not torch.equal(patches(both, 1), patches(plain, 1)), "which colours do not move"
    held_out = [made.load(Segment(HeldOut(0, 0), made.encode(0).samples[0])).images[0] for made in (both, plain)]
    assert torch.equal(*(image.patches() for image in held_out)), "validation sees whole images"


QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 4 * 28**2, "max_pixels": 64 * 28**2}
MERGED = ModelConfig(vision=VisionConfig(patch_size=14), projector=ProjectorConfig(pixel_shuffle=2))


def config(folder: Path, **data: int) -> Config:
    return Config(model=MERGED, checkpoint=CheckpointConfig(init_from=str(folder)), data=DataConfig(**data))  # type: ignore[arg-type]


def write(folder: Path, options: dict[str, object]) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(options))
    return folder


def test_a_half_downloaded_folder_is_named_with_the_file_that_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no preprocessor_config\.json .*complete the download"):
        processor_for(config(tmp_path))
    with pytest.raises(UserError, match=r"has no tokenizer\.json .*complete the download"):
        tokenizer_for(config(tmp_path))
    assert processor_for(Config(model=MERGED)).layout(100, 100).size == (100, 100), "random weights need no file"


@pytest.mark.parametrize(
    ("bounds", "features"),
    [({}, 36), ({"max_pixels": 16 * 28**2}, 16), ({"min_pixels": 49 * 28**2}, 49), ({"max_pixels": 2**24}, 36)],
)
def test_bounds_of_the_area_resize_an_image(bounds: dict[str, int], features: int, tmp_path: Path) -> None:
    assert processor_for(config(write(tmp_path, QWEN), **bounds)).layout(6 * 28, 6 * 28).features == features


def test_bounds_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 50176 and at most 50175 pixels"):
        processor_for(config(write(tmp_path, {**QWEN, "min_pixels": 64 * 28**2}), max_pixels=50175))
    clip = write(tmp_path, {"image_processor_type": "CLIPImageProcessor", "size": 224, "crop_size": 224})
    with pytest.raises(UserError, match=r"--max-pixels is for models that see images at their own size \(Qwen's\)"):
        processor_for(config(clip, max_pixels=50176))


@pytest.mark.parametrize("nested", [False, True])
def test_a_wrong_option_is_told_with_its_file(tmp_path: Path, nested: bool) -> None:
    options = {**QWEN, "rescale_factor": 1e300}
    file = tmp_path / ("processor_config.json" if nested else "preprocessor_config.json")
    file.write_text(json.dumps({"image_processor": options} if nested else options))
    with pytest.raises(UserError, match=rf"^{file}: rescale_factor 1e\+300 must be a number"):
        processor_for(config(tmp_path))


def test_a_tokenizer_of_another_family_is_refused(tmp_path: Path) -> None:
    """Its tokens are numbers of other words: such a run trains, and forgets what the model knew."""
    specials = SPECIALS["qwen"].split()
    saved = {"own": byte_level(specials), "more": byte_level((*specials, "<audio>")), "other": llama()}
    for name, backend in saved.items():
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>" if name != "other" else "</s>")
        fast.save_pretrained(tmp_path / name)

    def run(tokenizer: str, start: dict[str, str]) -> Config:
        return Config(checkpoint=CheckpointConfig(**start), data=DataConfig(tokenizer=str(tmp_path / tokenizer)))  # type: ignore[arg-type]

    for option in ("init_from", "language_from"):
        start = {option: str(tmp_path / "own")}
        assert tokenizer_for(run("more", start)).vocab_size > 256, "more tokens, and plain text as before"
        with pytest.raises(UserError, match=r"other is of another family than the model in .*own: .*leave --tokenizer"):
            tokenizer_for(run("other", start))
    (tmp_path / "bare").mkdir()
    assert tokenizer_for(run("other", {"init_from": str(tmp_path / "bare")})), "a folder without one says nothing"
    assert tokenizer_for(run("other", {})), "nor do random weights"
