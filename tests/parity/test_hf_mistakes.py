"""What is wrong with a folder is said in one error that lists all of it, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megavlm.programs import convert
from tests.support import hf
from tests.support.fresh import run_programs
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
    """What `import` says; it must not have written anything."""
    out = folder.with_name("out")
    assert convert.main(["import", str(folder), str(out), *flags]) == 2
    assert not out.exists()
    return capsys.readouterr().err


def test_missing_surplus_and_misshapen_tensors_are_listed_together(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_pickles_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    assert "unpickling can run code" in refusal(folder, capsys)


def test_quantized_weights_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_config(folder, quantization_config={"quant_method": "awq"})
    assert "holds quantized weights" in refusal(folder, capsys)


def test_half_a_file_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "is no complete safetensors file" in refusal(folder, capsys)


def test_an_index_must_not_lead_out_of_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../other.safetensors"}}')
    assert "'../other.safetensors', which is not in the folder" in refusal(folder, capsys)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported; supported are gemma3, glm4v, glm46v, glm4v_moe, internvl",
        ),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act = 'relu' is not supported"),
        ({"vision_feature_layer": [1, 2]}, "vision_feature_layer = [1, 2] is not supported"),
        ({"vision_feature_select_strategy": "full"}, "the class token as a feature is not known here"),
        ({"text_config": {"model_type": "gemma"}}, "text_config: model_type = 'gemma' is not supported"),
        ({"text_config": {"model_type": "llama", "hidden_act": "gelu"}}, "only SwiGLU language models are known here"),
        ({"text_config": {"rope_parameters": {"rope_type": "longrope"}}}, "known rotary scalings are"),
        ({"vision_config": {"image_size": [224, 448]}}, "image_size = [224, 448] is not supported: only square"),
    ],
)
def test_what_cannot_be_expressed_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], expected: str
) -> None:
    change_config(folder, **values)
    assert expected in refusal(folder, capsys)


def test_an_option_that_contradicts_the_folder_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(folder, capsys, "--set", "model.vision.num_layers=7")
    assert "model.vision.num_layers 7 contradicts" in message
    assert "which has 3: leave it out" in message


def test_a_sequence_beyond_the_folders_positions_is_refused_with_advice_that_works(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = [
        "--set",
        "model.language.max_positions=null",
        "--seq-length",
        "640",
    ]  # none is the default: the folder decides
    message = refusal(folder, capsys, *longer)
    assert "--seq-length 640 is longer than the 512 positions" in message
    assert f"raise max_position_embeddings (and sliding_window, if it is less) in {folder}/config.json" in message
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change_config(folder, text_config={**text, "max_position_embeddings": 1024})
    assert convert.main(["import", str(folder), str(folder.with_name("out")), *longer]) == 0


def test_a_layout_that_does_not_work_is_refused_before_converting(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--pp 16 × --vpp 1 needs 16 chunks" in refusal(folder, capsys, "--pp", "16")


def test_export_needs_to_know_where_a_run_came_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert f"RUN_OR_CHECKPOINT {tmp_path / 'nothing'} is no folder" in capsys.readouterr().err


def test_verify_finds_a_difference(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(["import", str(folder), str(tmp_path / "ours")]) == 0
    assert convert.main(["verify", str(folder), str(tmp_path / "ours")]) == 0
    assert "largest logit difference" in capsys.readouterr().out

    def nudge(weights: dict[str, Any]) -> None:
        weights["language_model.model.layers.0.mlp.up_proj.weight"][0, 0] += 1

    change_weights(folder, nudge)
    assert convert.main(["verify", str(folder), str(tmp_path / "ours")]) == 1
    assert "more than --tolerance 0.0001" in capsys.readouterr().err


def test_import_writes_into_no_model_and_no_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    for out, what in ((folder, "has a config.json, as models do"), (tmp_path / "run", "is a run")):
        assert convert.main(["import", str(folder), str(out)]) == 2
        assert f"OUT_DIR {out} {what}: name another folder" in capsys.readouterr().err


def test_verify_takes_the_model_first(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(["verify", str(tmp_path), str(folder)]) == 2
    assert f"HF_DIR comes first: write {folder} {tmp_path}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_programs_work_as_they_are_started(folder: Path, tmp_path: Path) -> None:
    """In processes of their own, where nothing has activated a backend before: import, train from both, export."""

    run = ["--train-iters", "1", "--global-batch-size", "1", "--seq-length", "48", "--no-tensorboard", "--run-dir"]
    ours, theirs, a, b = (str(tmp_path / name) for name in ("ours", "theirs", "a", "b"))
    commands = [
        ["tools/convert.py", "import", str(folder), ours],
        ["pretrain_vlm.py", "--config", f"{ours}/config.yaml", *run, a],
        ["pretrain_vlm.py", "--init-from", str(folder), *run, b],
        ["tools/convert.py", "export", b, theirs],
        ["tools/convert.py", "verify", theirs, a],
    ]
    results = run_programs(commands)
    assert [status for status, _ in results] == [0] * len(commands), results[-1][1]
