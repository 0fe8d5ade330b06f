"""Which processor and tokenizer a run takes, and what is said of a folder that lacks them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from megavlm.config.schema import CheckpointConfig, Config, DataConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data.preprocessors import processor_for, tokenizer_for
from megavlm.errors import UserError
from tests.support.tokenizers import SPECIALS, byte_level, llama

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
