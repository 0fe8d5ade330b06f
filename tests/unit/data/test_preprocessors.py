"""Which processor and tokenizer a run takes, and what is said of a folder that lacks them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megavlm.config.schema import CheckpointConfig, Config, DataConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data.preprocessors import processor_for, tokenizer_for
from megavlm.errors import UserError

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
    processor = processor_for(config(write(tmp_path, QWEN), **bounds))
    assert processor.layout(6 * 28, 6 * 28).features == features


def test_bounds_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 50176 and at most 50175 pixels"):
        processor_for(config(write(tmp_path, {**QWEN, "min_pixels": 64 * 28**2}), max_pixels=50175))
    clip = write(tmp_path, {"image_processor_type": "CLIPImageProcessor", "size": 224, "crop_size": 224})
    with pytest.raises(UserError, match=r"--max-pixels is for models that see images at their own size \(Qwen's\)"):
        processor_for(config(clip, max_pixels=50176))
