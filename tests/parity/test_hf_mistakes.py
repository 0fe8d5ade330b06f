"""What is wrong with a folder is said in one error that lists all of it, and nothing is written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megavlm.checkpoint.hf.pretrained import with_pretrained_model
from megavlm.checkpoint.hf.sidecar import carry_sidecar, sidecars
from megavlm.command_line.parsing import parse
from megavlm.config.schema import DataConfig
from megavlm.errors import UserError
from megavlm.inference.folders import ModelFolder
from megavlm.programs import chat, compare, convert
from megavlm.rules.check import check
from tests.support import hf
from tests.support.harness import Single
from tests.support.tiny_models import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf.save(tiny("llava"), tmp_path / "hf")


def change_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What a run that begins with the folder, or without flags `verify`, says."""
    if not flags:
        assert convert.main(["verify", str(folder)]) == 2
        return capsys.readouterr().err
    with pytest.raises(UserError) as refused:
        check(with_pretrained_model(parse(["--init-from", str(folder), *flags])), world=1)
    return str(refused.value)


def test_missing_surplus_and_misshapen_tensors_are_listed_together(folder, capsys):
    def damage(weights: dict[str, Any]) -> None:
        del weights["multi_modal_projector.linear_2.bias"]
        del weights["language_model.model.layers.1.self_attn.k_proj.weight"]
        weights["language_model.model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
        weights["language_model.model.norm.weight"] = torch.zeros(31)

    change_weights(folder, damage)
    message = refusal(folder, capsys)
    for expected in (
        "4 tensors do not fit, nothing was written",
        "missing multi_modal_projector.linear_2.bias",
        "missing language_model.model.layers.1.self_attn.k_proj.weight",
        "surplus language_model.model.layers.0.self_attn.q_proj.bias",
        "language_model.model.norm.weight is [31] where language.norm.weight needs [32]",
    ):
        assert expected in message


@pytest.mark.parametrize("says", [{}, {"architectures": ["LlavaForSequenceClassification"]}])
def test_a_reward_model_answers_no_questions(folder, capsys, says):
    """Its vocabulary is not trained; `verify` compares it all the same."""
    change_weights(folder, lambda weights: weights.update({"score.weight": torch.zeros(1, 32)}))
    change_config(folder, **says)
    for main, words, remedy in (
        (chat.main, ["--prompt", "?"], "megavlm logprobs"),
        (compare.main, [str(folder)], "name a file of pairs"),
    ):
        assert main([str(folder), *words]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert "is a reward model" in said
        assert remedy in said
    if not says:
        assert convert.main(["verify", str(folder)]) == 0


def test_an_embedding_model_answers_no_questions(folder, capsys, tmp_path):
    (folder / "megavlm_embedding.json").write_text("{}")
    assert chat.main([str(folder), "--prompt", "?"]) == 2
    assert "megavlm embed writes its vectors" in capsys.readouterr().err
    with pytest.raises(UserError, match="was trained to embed, and predicts no token"):
        ModelFolder(folder, DataConfig(), "", tmp_path).as_run()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def led_out(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../other.safetensors"}}')


@pytest.mark.parametrize(
    ("damage", "flags", "expected"),
    [
        (pickled, "", "unpickling can run code"),
        (cut, "", "is no complete safetensors file"),
        (led_out, "", "'../other.safetensors', which is not in the folder"),
        (bool, "--set model.vision.num_layers=7", "model.vision.num_layers 7 contradicts"),
    ],
)
def test_what_is_no_model_is_refused(folder, capsys, damage, flags, expected):
    damage(folder)
    assert expected in refusal(folder, capsys, *flags.split())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported; supported are ",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "holds quantized weights"),
        ({"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}}, "holds quantized weights"),
        ({"text_config": {"model_type": "gpt_oss", "swiglu_limit": 5.0}}, "swiglu_limit = 5.0 is not supported"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act = 'relu' is not supported"),
        ({"vision_feature_layer": [1, 2]}, "vision_feature_layer = [1, 2] is not supported"),
        ({"vision_feature_select_strategy": "full"}, "the class token as a feature is not known here"),
        ({"text_config": {"model_type": "gemma"}}, "text_config: model_type = 'gemma' is not supported"),
        ({"text_config": {"model_type": "llama", "hidden_act": "gelu"}}, "only SwiGLU language models are known here"),
        ({"text_config": {"rope_parameters": {"rope_type": "longrope"}}}, "known rotary scalings are"),
        ({"vision_config": {"image_size": [224, 448]}}, "image_size = [224, 448] is not supported: only square"),
    ],
)
def test_what_cannot_be_expressed_is_refused(folder, capsys, values, expected):
    change_config(folder, **values)
    assert expected in refusal(folder, capsys)


def test_a_sequence_beyond_the_folders_positions_is_refused_with_advice_that_works(folder, capsys):
    # None is the default: the folder decides.
    longer = "--set model.language.max_positions=null --seq-length 640".split()
    message = refusal(folder, capsys, *longer)
    assert "--seq-length 640 is longer than the 512 positions" in message
    assert f"raise max_position_embeddings (and sliding_window, if it is less) in {folder}/config.json" in message
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change_config(folder, text_config={**text, "max_position_embeddings": 1024})
    check(with_pretrained_model(parse(["--init-from", str(folder), *longer])), world=1)


def test_verify_finds_a_difference(folder, single, tmp_path, capsys):
    hf.run_of(folder, tmp_path / "ours", single)
    assert convert.main(["verify", str(folder), str(tmp_path / "ours")]) == 0
    assert "largest logit difference" in capsys.readouterr().out

    def nudge(weights: dict[str, Any]) -> None:
        weights["language_model.model.layers.0.mlp.up_proj.weight"][0, 0] += 1

    change_weights(folder, nudge)
    assert convert.main(["verify", str(folder), str(tmp_path / "ours")]) == 1
    told = capsys.readouterr().err
    assert "more than --tolerance 0.0001" in told
    assert "the first module that differs beyond rounding: language.layers.0.mlp.linear_fc2 " in told

    def spoil(weights: dict[str, Any]) -> None:
        weights["language_model.model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan

    change_weights(folder, spoil)
    assert convert.main(["verify", str(folder), str(tmp_path / "ours")]) == 2
    assert "layers.0.mlp.up_proj.weight of" in (told := capsys.readouterr().err)
    assert "has values that are NaN or infinite" in told


@pytest.mark.parametrize(("name", "lacking"), [("llava", "preprocessor_config"), ("text-llama", "tokenizer")])
def test_a_chat_proposes_what_it_has(name: str, lacking: str, tmp_path: Path, capsys) -> None:
    folder = hf.save(tiny(name), tmp_path / "hf")
    capsys.readouterr()
    assert chat.main([str(folder), "--prompt", "Hi"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert lacking in line
    assert line.endswith("complete the download")


def test_folders_are_named_in_their_order(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(["verify", str(tmp_path), str(folder)]) == 2
    assert f"HF_DIR comes first: write {folder} {tmp_path}" in capsys.readouterr().err
    assert convert.main(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert f"RUN_OR_CHECKPOINT {tmp_path / 'nothing'} is no folder" in capsys.readouterr().err


def test_an_import_is_told_to_begin_with_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(["import", "hf", "out"]) == 2
    assert "start it with --init-from HF_DIR" in capsys.readouterr().err


@pytest.fixture(scope="module")
def original(single: Single, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that began with a folder."""
    root = tmp_path_factory.mktemp("original")
    return hf.run_of(hf.save(tiny("llava"), root / "theirs"), root / "ours", single)


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of it, beside a file of someone else."""
    shutil.copytree(original, tmp_path / "ours")
    (tmp_path / "foreign.safetensors").write_text("someone else's")
    return tmp_path / "ours"


def listing(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def apply(sidecar: Path) -> None:
        values = json.loads((sidecar / "tensors.json").read_text())
        change(values)
        (sidecar / "tensors.json").write_text(json.dumps(values))

    return apply


def name_file(name: object) -> Callable[[Path], None]:
    return listing(lambda values: values["files"].update({next(iter(values["files"])): name}))


def link(name: str, to: str) -> Callable[[Path], None]:
    def apply(sidecar: Path) -> None:
        if (sidecar / name).exists():
            (sidecar / name).rename(sidecar / f"{name.replace('/', '-')}-moved")
        (sidecar / name).symlink_to(sidecar.parents[1] / to if to.startswith("..") else to)

    return apply


def fifo(sidecar: Path) -> None:
    (sidecar / "tensors.json").unlink()
    os.mkfifo(sidecar / "tensors.json")


CASES: dict[str, Callable[[Path], None]] = {
    "absolute": name_file("/tmp/megavlm-foreign.safetensors"),
    "above": name_file("../foreign.safetensors"),
    "no safetensors": name_file("config.json"),
    "no name": name_file(7),
    "unknown tensor": listing(lambda values: values["files"].update(nothing="model.safetensors")),
    "tensor left out": listing(lambda values: values["files"].pop(next(iter(values["files"])))),
    "unknown spelling": listing(lambda values: values.update(spelling=98)),
    "no spelling": listing(lambda values: values.pop("spelling")),
    "spelling of another type": listing(lambda values: values.update(spelling="0")),
    "deep": lambda sidecar: (sidecar / "tensors.json").write_text("[" * 100_000) and None,
    "fifo": fifo,
    "linked file": link("files/notes.txt", "/etc/passwd"),
    "linked config": link("files/config.json", "/etc/passwd"),
    "linked folder": link("files", "/etc"),
    "linked tensors": link("unused.safetensors", "/etc/passwd"),
}


@pytest.mark.parametrize("damage", CASES.values(), ids=CASES)
def test_an_export_writes_only_its_own_folder(run, tmp_path, capsys, damage):
    damage(run / "hf")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert convert.main(["export", str(run), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megavlm convert: ")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not Path("/tmp/megavlm-foreign.safetensors").exists()
    assert (tmp_path / "foreign.safetensors").read_text() == "someone else's"


def test_damaged_tensors_are_not_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = max(run.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    for at in range(0, len(content), 512):  # moments are not exported
        content[at] ^= 64
    file.write_bytes(content)
    assert convert.main(["export", str(run), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{file.name} is damaged" in line
    assert not list(tmp_path.glob("*out*"))


def test_a_link_in_a_folder_is_not_copied_into_runs(single: Single, tmp_path: Path) -> None:
    folder = hf.save(tiny("llava"), tmp_path / "theirs")
    (folder / "notes.txt").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="is a link that leads out of its folder"):
        hf.run_of(folder, tmp_path / "ours", single)
    assert not list((tmp_path / "ours").rglob("notes.txt"))


def parts_in(parent: Path) -> Path:
    """The `hf/` of a model of parts, as small as it can be."""
    for part in ("vision", "projector", "language"):
        files = parent / "hf" / part / "files"
        files.mkdir(parents=True)
        (files / "config.json").write_text(json.dumps({"part": part}))
        (files.parent / "unused.safetensors").write_bytes(b"")
        (files.parent / "tensors.json").write_text(json.dumps({"spelling": 0, "files": {}}))
    return parent / "hf"


def test_a_run_takes_the_parts_of_the_checkpoint_that_it_starts_from(tmp_path: Path) -> None:
    theirs = parts_in(tmp_path / "theirs")
    (tmp_path / "mine").mkdir()
    carry_sidecar(tmp_path / "theirs", tmp_path / "mine")
    mine = sidecars(tmp_path / "mine")
    assert {part: (each.files / "config.json").read_bytes() for part, each in mine.items()} == {
        part: (theirs / part / "files" / "config.json").read_bytes() for part in ("vision", "projector", "language")
    }
    assert all(each.path.is_relative_to(tmp_path / "mine") for each in mine.values())
    carry_sidecar(tmp_path / "mine", tmp_path / "mine")  # a run that goes on


@pytest.mark.parametrize(
    ("name", "linked"),
    [
        *((name, True) for name in ("hf", "hf/projector", "hf/projector/files", "hf/projector/files/config.json")),
        *((name, False) for name in ("hf/projector", "hf/projector/files")),
    ],
)
def test_a_part_that_is_elsewhere_or_missing_is_one_line(tmp_path: Path, name: str, linked: bool) -> None:
    parts_in(tmp_path / "theirs")
    place = tmp_path / "theirs" / name
    place.rename(tmp_path / "moved")
    if linked:
        place.symlink_to(tmp_path / "moved")
    with pytest.raises(UserError, match=r"is damaged .* nothing can be exported from it"):
        sidecars(tmp_path / "theirs")
