"""Folders of quantized weights are read as those of the weights that they stand for, which exports write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megavlm.checkpoint.hf.hf_files import INDEX
from megavlm.checkpoint.hf.quantized import opened
from megavlm.checkpoint.reading import Choices
from megavlm.errors import UserError
from megavlm.programs import convert
from megavlm.train.initial_state import initial_weights
from tests.support import hf
from tests.support.harness import Single
from tests.support.quantized_folders import KINDS, MODELS, quantized_and_plain


@pytest.mark.parametrize("name", MODELS)
def test_an_export_is_the_plain_folder(name: str, tmp_path: Path, single: Single, capsys: Any) -> None:
    quantized, plain = quantized_and_plain(name, tmp_path)
    held, expected = opened(quantized), opened(plain)
    assert held.tensors.keys() == expected.tensors.keys()
    for each, info in expected.tensors.items():
        height = (info.shape or (1,))[0]
        for rows in (slice(height // 3, height - height // 4), slice(height - 1, height)):
            assert torch.equal(held.read(each, rows), expected.read(each, rows)), (each, rows)
    if name in ("fp8-tensors", "mxfp4"):  # Transformers wants blocks that divide sizes, and a package for the others
        assert convert.main(["verify", str(quantized)]) == 0
    initial_weights(hf.config_for(quantized), Choices(()), vocab_size=1)
    assert f"{quantized} has {MODELS[name][0].partition(' ')[0]} weights: they are dequ" in capsys.readouterr().out
    hf.run_of(quantized, tmp_path / "run", single)
    assert convert.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    files = {"config.json": json.loads((plain / "config.json").read_text())}
    files[INDEX] = json.loads((plain / INDEX).read_text())["weight_map"]
    assert json.loads((tmp_path / "out/config.json").read_text()) == files["config.json"]
    assert json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"] == files[INDEX]
    for file in plain.glob("*.safetensors"):
        ours, theirs = load_file(tmp_path / "out" / file.name), load_file(file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[each], theirs[each]) and ours[each].dtype == theirs[each].dtype for each in theirs)


def changed(section: str, **values: Any) -> dict[str, Any]:
    """Return the quantization_config of INT4 with other values."""
    said = json.loads(json.dumps(KINDS["INT4"][1]))
    (said["config_groups"]["group_0"]["weights"] if section else said).update(values)
    return said


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"quant_method": "awq", "bits": 4}, "holds quantized weights that cannot be read (awq; known are FP8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "that cannot be read (NVFP4; "),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision"}, "that cannot be read (mixed-precision; "),
        (changed("weights", symmetric=False), "that cannot be read (pack-quantized; "),
        (changed("weights", group_size="32"), "group_size '32' must be a whole number"),
        (changed("weights", actorder="group"), "that cannot be read (pack-quantized; "),
        (changed("", format="nvfp4-pack-quantized"), "that cannot be read (nvfp4-pack-quantized; "),
        (changed("", config_groups={"group_0": 3}), "config_groups {'group_0': 3} must be an object"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size [128] must be a list of 2 times"),
        ("fp8", "quantization_config 'fp8' must be an object"),
    ],
)
def test_what_cannot_be_dequantized_is_refused(tmp_path: Path, said: Any, expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    with pytest.raises(UserError) as refused:
        opened(tmp_path, weights=False)
    assert expected in str(refused.value)


def test_scales_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    numbers, scales = torch.ones(40, 24).to(torch.float8_e4m3fn), torch.ones(2, 3)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": KINDS["FP8 blocks"][1]}))
    for tensors, expected in (
        ({"w": numbers}, "w is of type F8_E4M3, which cannot be read"),
        ({"w": numbers, "w_scale_inv": scales}, r"w is \[40, 24\], which \[2, 3\] scales do not divide into blocks of"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=expected):
            assert opened(tmp_path).tensors
