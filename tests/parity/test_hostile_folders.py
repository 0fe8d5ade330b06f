"""What a folder of Hugging Face says is of the type and size that a model has, or is refused in one line."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from megavlm.checkpoint.hf.pretrained import Pretrained
from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megavlm.errors import UserError
from megavlm.families import PUBLISHED, VIDEO_READERS, family_of, processor_from
from megavlm.families.shared.settings import Settings
from megavlm.inference.assistant import check_generation
from megavlm.inputs.reader import VideoReader
from megavlm.inputs.video import Clip
from megavlm.json_files import read_json
from tests.support import tokenizers
from tests.support.covering import slow
from tests.support.hostile import assert_answered
from tests.support.tiny_models import config_of

WRONG: tuple[Any, ...] = (
    *("64", "x", [], [64, 32], {}, -1, 0, 10**7, 10**12, 10**400, 1.5, float("nan"), float("inf"), True),
)


def sections(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """Places of all settings in a config and its sections."""
    found = []
    for name, value in config.items():
        found.append((name,))
        if isinstance(value, dict):
            found += [(name, *rest) for rest in sections(value)]
    return found


def changed(values: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = place
    return {**values, first: changed(values[first], tuple(rest), value) if rest else value}


CONFIG = config_of("llava").to_dict()


def describe(config: dict[str, Any]) -> None:
    settings = Settings(config, "config.json")
    family = family_of(settings)
    family.table(family.config(settings), family.name_prefixes[0])


@pytest.mark.parametrize("step", [11, slow(1)])
def test_a_setting_of_another_type_or_size_is_one_line(step: int) -> None:
    """Give each setting of each family each wrong value; of all these pairs, take every `step`-th."""
    configs = [CONFIG, *({"model_type": family.model_types[0], **values} for family, values in PUBLISHED.values())]
    cases = [(config, place, value) for config in configs for place in sections(config) for value in WRONG]
    assert len(WRONG) % step or step == 1, "the same values of each setting would be taken"
    for config, place, value in cases[::step]:
        assert_answered(partial(describe, changed(config, place, value)))


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps"]
)
@pytest.mark.parametrize("value", ["64", [64], 10**12, {}, -1, True])
def test_the_line_names_the_file_and_the_setting(name: str, value: Any) -> None:
    settings = Settings(changed(CONFIG, ("text_config", name), value), "theirs/config.json")
    with pytest.raises(UserError, match=rf"^theirs/config.json: text_config: {name} .* must be .*: correct it"):
        family_of(settings).config(settings)


CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
    "do_center_crop": True,
}
QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 1}


@pytest.mark.parametrize(
    "name", ["size", "crop_size", "resample", "rescale_factor", "image_mean", "image_std", "do_resize"]
)
def test_an_option_of_an_image_processor_likewise(name: str) -> None:
    for value in (*WRONG, [0, 0, 0], {"height": 10**9, "width": 10**9}, {"shortest_edge": "x"}, {"shortest_edge": 0}):
        assert_answered(lambda value=value: processor_from({**CLIP, name: value}, ModelConfig()))


READERS = {reader.classes[0]: reader for reader in VIDEO_READERS.values() if reader.classes}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_an_option_of_a_video_processor_likewise(reader: VideoReader) -> None:
    vision = VisionConfig(patch_size=16, temporal_patch_size=2)
    side = 4 if "downsample_mode" in reader.defaults else 2  # MiniCPM-V's merges twice
    model = ModelConfig(vision=vision, projector=ProjectorConfig(pixel_shuffle=side), video_token=9)
    film = Clip(60, 90, tuple(number / 10 for number in range(20)), 10.0)

    def described(options: dict[str, Any]) -> None:
        given = {"patch_size": 16, "video_processor_type": f"{reader.classes[0]}VideoProcessor", **options}
        videos = processor_from(CLIP, model, video=given).video
        assert videos.layout(film, videos.usual).film is not None

    described({})
    names = ("size", "max_image_size", "resample", "image_std", "fps", "num_frames", "min_frames", "video_sampling")
    for name in names:
        for value in (*WRONG, [0, 0, 0], {"fps": "x"}, {"height": 10**9, "width": 10**9}, {"longest_edge": "x"}):
            assert_answered(partial(described, {name: value}))


@pytest.mark.parametrize(
    "values", [{"max_pixels": 0}, {"min_pixels": "x"}, {"size": {"shortest_edge": 1, "longest_edge": 10**12}}]
)
def test_a_budget_of_pixels_is_one(values: dict[str, Any]) -> None:
    model = ModelConfig()
    options = {**QWEN, "patch_size": model.vision.patch_size, "merge_size": model.projector.pixel_shuffle, **values}
    with pytest.raises(UserError, match="must be"):
        processor_from(options, model)


@pytest.mark.parametrize("content", [b"[" * 10**6, b"{" * 10**6, b"[]", b"7", b'"x"', b"", b"\xff", b'{"a": ' * 10**5])
def test_json_of_any_shape_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json") as caught:
        read_json(tmp_path / "config.json")
    assert len(str(caught.value).splitlines()) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.llama(), eos_token="</s>", bos_token="<s>")
    made.save_pretrained(folder)
    HuggingFaceTokenizer.of(folder)
    return folder


def test_a_tokenizer_file_that_is_none_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "special_tokens_map.json")
    with pytest.raises(UserError, match="cannot be read"):
        HuggingFaceTokenizer.of(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer_file": "ELSEWHERE/tokenizer.json"},
        {"vocab_file": "ELSEWHERE/tokenizer.json", "tokenizer_class": "BertTokenizer"},
        {"fast_tokenizer_files": ["../elsewhere/tokenizer.4.0.0.json"]},
        {"fast_tokenizer_files": ["ELSEWHERE/tokenizer.4.0.0.json"]},
        {"init_inputs": ["ELSEWHERE/tokenizer.json"]},
        {"sp_model_kwargs": {"model_file": "ELSEWHERE/tokenizer.json"}},
    ],
)
def test_a_tokenizer_lies_in_its_folder(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("tokenizer.json", "tokenizer.4.0.0.json"):
        (elsewhere / name).write_bytes((folder / "tokenizer.json").read_bytes())
    given = json.loads((folder / "tokenizer_config.json").read_text())
    named = json.loads(json.dumps(options).replace("ELSEWHERE", str(elsewhere)))
    (folder / "tokenizer_config.json").write_text(json.dumps({**given, **named}))
    with pytest.raises(UserError, match=r"names files by|no plain file name"):
        HuggingFaceTokenizer.of(folder)


def test_no_template_leads_out_of_its_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.jinja").write_text("secret")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").symlink_to(tmp_path / "secret.jinja")
    with pytest.raises(UserError, match="leads out"):
        HuggingFaceTokenizer.of(folder)


def pattern(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("text", ["a" * 100 + "!", "b" * 10_000 + "c"])
@pytest.mark.parametrize("regex", ["(a+)+$", "(b|b)*$", "(b*)*$"])
def test_a_pattern_that_goes_back_and_forth_is_one_line_or_one_sample(folder: Path, regex: str, text: str) -> None:
    described = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**described, "pre_tokenizer": pattern(regex)}))
    assert_answered(lambda: HuggingFaceTokenizer.of(folder).encode(text))


def replaced(times: int) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * times}


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ("normalizer", [replaced(3)] * 3),
        ("normalizer", [{"type": "Prepend", "prepend": "a" * 17}]),
        ("normalizer", [{"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 17}]),
        ("decoder", [replaced(17)]),
    ],
)
def test_a_tokenizer_that_multiplies_texts_is_refused(folder: Path, part: str, steps: list[dict[str, Any]]) -> None:
    described = json.loads((folder / "tokenizer.json").read_text())
    listed = {"normalizer": "normalizers", "decoder": "decoders"}[part]
    nested = {"type": "Sequence", listed: [{"type": "Sequence", listed: steps}]}
    (folder / "tokenizer.json").write_text(json.dumps({**described, part: nested}))
    with pytest.raises(UserError, match=rf"cannot be read \(its {part} makes texts \d+ times as long\)"):
        HuggingFaceTokenizer.of(folder)


@pytest.mark.parametrize("name", ["eos_token_id", "top_k", "top_p"])
@pytest.mark.parametrize("value", ["x", -1, 10**30, [-1, "x"], float("nan")])
def test_what_answers_are_generated_with_is_checked(tmp_path: Path, name: str, value: Any) -> None:
    check_generation(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [1, 2], "top_k": 50, "top_p": 1.0}))
    check_generation(tmp_path)
    file.write_text(json.dumps({name: value}))
    with pytest.raises(UserError, match=rf"generation_config.json: {name} .* must be"):
        check_generation(tmp_path)


def test_a_tokenizer_that_adds_very_many_tokens_is_refused(folder: Path) -> None:
    described = json.loads((folder / "tokenizer.json").read_text())
    mark, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        **{"type": "TemplateProcessing", "single": [mark] * 50 + [text], "pair": [text, text]},
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1] * 50, "tokens": ["<s>"] * 50}},
    }
    (folder / "tokenizer.json").write_text(json.dumps({**described, "post_processor": template}))
    with pytest.raises(UserError, match=r"cannot be read \(its post_processor adds 2500 tokens to each text\)"):
        HuggingFaceTokenizer.of(folder)


@pytest.mark.parametrize(
    "content", ["[" * 10**5, "{}", "[]", "7", '{"model": {"type": "BPE"}}', '{"version": "9"}', ""]
)
def test_a_damaged_tokenizer_is_one_line(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UserError) as caught:
        HuggingFaceTokenizer.of(folder)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_far_larger_than_its_files_is_one_line_before_it_is_made(tmp_path: Path, name: str) -> None:
    """Each setting is one that a model has; a rank would allocate gigabytes before it looked for its tensors."""
    family, values = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family.model_types[0], **values}))
    save_file({"a": torch.ones(4, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"a model of .* is described, and there are .*: complete the files of"):
        Pretrained.of(tmp_path, *family.parts)
