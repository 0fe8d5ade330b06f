"""Experts in files: one by one, stacked, or stacked and transposed; a rank reads those that it holds and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megavlm.checkpoint.hf import hf_files
from megavlm.checkpoint.hf.hf_files import HfFolder
from megavlm.checkpoint.hf.pretrained import Pretrained
from megavlm.config.schema import ExpertsConfig, ModelConfig
from megavlm.errors import UserError
from megavlm.families import FAMILIES, family_of
from megavlm.families.shared.experts import experts_table
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import matches

NUMBER, INNER, WIDTH = 6, 3, 5  # twice the inner width is not the width: each orientation shows
EXPERTS = ExpertsConfig(num_experts=NUMBER, ffn_hidden_size=INNER)
FIRST, SECOND = (f"layer.mlp.experts.experts.linear_fc{number}.weight" for number in (1, 2))
OURS = {
    FIRST: torch.arange(NUMBER * 2 * INNER * WIDTH).view(NUMBER, 2 * INNER, WIDTH).float(),
    SECOND: -torch.arange(NUMBER * WIDTH * INNER).view(NUMBER, WIDTH, INNER).float(),
    "layer.mlp.router.weight": torch.ones(NUMBER, WIDTH),
}
SPELLINGS = ("apart", "stacked", "transposed")


def in_files(stored: str) -> dict[str, Tensor]:
    """The same weights as files have them, written without the table."""
    first, second = OURS[FIRST], OURS[SECOND]
    router = {"hf.mlp.gate.weight": OURS["layer.mlp.router.weight"]}
    if stored == "apart":
        for number in range(NUMBER):
            name = f"hf.mlp.experts.{number}."
            gate, up = first[number].chunk(2)
            router |= {f"{name}gate_proj.weight": gate, f"{name}up_proj.weight": up}
            router[f"{name}down_proj.weight"] = second[number]
        return router
    turned = (first.mT, second.mT) if stored == "transposed" else (first, second)
    return router | dict(zip(("hf.mlp.experts.gate_up_proj", "hf.mlp.experts.down_proj"), turned, strict=True))


def opened(stored: Any, folder: Path) -> Pretrained:
    save_file({name: tensor.contiguous() for name, tensor in in_files(stored).items()}, folder / "model.safetensors")
    table = experts_table(EXPERTS, "layer.", "hf.", hidden_size=WIDTH, stored=stored)
    return Pretrained(HfFolder(folder), FAMILIES[0], ModelConfig(), (), 0, table)


@pytest.mark.parametrize("stored", SPELLINGS)
def test_any_part_of_the_experts_is_read_and_no_other_expert(stored, tmp_path, monkeypatch):
    """EP gives a rank some experts, ETP some of the rows of each half of the first matrix, or columns of the second."""
    pretrained, read = opened(stored, tmp_path), list[int]()
    actual = hf_files.read_into
    monkeypatch.setattr(hf_files, "read_into", lambda *given: (read.append(given[1].nbytes), actual(*given)))
    for key, rows, columns in (
        (FIRST, slice(0, 2 * INNER), slice(0, WIDTH)),
        (FIRST, slice(INNER + 1, 2 * INNER), slice(0, WIDTH)),
        (SECOND, slice(0, WIDTH), slice(1, INNER)),
    ):
        read.clear()
        index = (slice(2, 4), rows, columns)
        assert torch.equal(pretrained.read_slice(key, tuple(OURS[key].shape), index), OURS[key][index])
        assert sum(read) <= 2 * OURS[key][0].nbytes


def test_the_orientation_is_told_by_the_shapes() -> None:
    tables: Any = {
        stored: experts_table(EXPERTS, "layer.", "hf.", hidden_size=WIDTH, stored=stored)  # type: ignore[arg-type]
        for stored in SPELLINGS
    }
    for stored in SPELLINGS:
        shapes = {name: tuple(tensor.shape) for name, tensor in in_files(stored).items()}
        assert max(tables, key=lambda each: matches(tables[each], shapes)) == stored


QWEN: dict[str, Any] = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 16}
GLM: dict[str, Any] = {"num_hidden_layers": 4, "n_routed_experts": 16, "first_k_dense_replace": 2}


def experts_of(text: dict[str, Any], kind: str = "internvl") -> ExpertsConfig:
    settings = Settings({"model_type": kind, "text_config": text}, "config.json")
    return family_of(settings).config(settings).experts


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"num_experts": 16, "router_topk": 8, "ffn_hidden_size": 768, "router_pre_softmax": True}),
        ({"num_local_experts": 8}, {"num_experts": 8}),  # as Transformers 5 writes it
        ({"norm_topk_prob": True}, {"router_pre_softmax": False}),
        ({"decoder_sparse_step": 2}, {"dense_layers": (0, 2, 4)}),
        ({"mlp_only_layers": [0, 5], "decoder_sparse_step": 3}, {"dense_layers": (0, 1, 3, 4, 5)}),
        ({"decoder_sparse_step": 7}, {"num_experts": 0}),
    ],
)
def test_settings_of_qwen3_moe(given: dict[str, Any], expected: dict[str, Any]) -> None:
    experts = experts_of(QWEN | given)
    assert {name: getattr(experts, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"dense_layers": (0, 1), "shared_ffn_hidden_size": 1408, "router_topk_scaling_factor": None}),
        (
            {"routed_scaling_factor": 2.5, "n_shared_experts": 2},
            {"router_topk_scaling_factor": 2.5, "shared_ffn_hidden_size": 2816},
        ),
        ({"n_group": 8, "topk_group": 4}, {"router_num_groups": 8, "router_group_topk": 4}),
    ],
)
def test_settings_of_glm(given: dict[str, Any], expected: dict[str, Any]) -> None:
    experts = experts_of(GLM | given, "glm4v_moe")
    assert {name: getattr(experts, name) for name in expected} == expected
    assert (experts.router_score_function, experts.router_enable_expert_bias) == ("sigmoid", True)


@pytest.mark.parametrize(
    "given", [{"norm_topk_prob": False}, {"num_experts_per_tok": 1}, {"n_group": 8, "topk_group": 2}]
)
def test_what_glms_router_would_compute_differently_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is not supported"):
        experts_of(GLM | given, "glm4v_moe")


def test_weights_that_are_integers_or_no_numbers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pretrained, "provides", lambda self, key: True)
    pretrained = opened("apart", tmp_path)
    name = "hf.mlp.experts.3.up_proj.weight"
    broken = in_files("apart")[name].clone()
    for value in (float("nan"), float("inf"), -float("inf")):
        broken[2, 4] = value
        save_file(in_files("apart") | {name: broken}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=rf"^{name} of {tmp_path} has values that are NaN or infinite: copy model"):
            pretrained.read_slice(FIRST, tuple(OURS[FIRST].shape), (slice(2, 5), slice(0, 2 * INNER), slice(0, WIDTH)))
        assert pretrained.folder.read(name, slice(0, 2)).isfinite().all()
    for dtype, word in ((torch.int32, "I32"), (torch.bool, "BOOL")):
        save_file(in_files("apart") | {name: broken.nan_to_num().to(dtype)}, tmp_path / "model.safetensors")
        again = replace(pretrained, folder=HfFolder(tmp_path))
        assert f"{name} is of type {word}, which holds no weights" in "\n".join(again.problems())


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("adapter_config.json", "is an adapter of PEFT: give the model"),
        ("metrics.jsonl", "is a run: go on with it by --load"),
        ("megavlm.json", "is a checkpoint: go on with it by --load"),
        ("snapshots", "give the hub's OWNER/NAME"),
        ("dataset_info.json", "is a data set: give it to --datasets"),
        ("model-q4.gguf", "holds GGUF weights"),
        ("notes.txt", r"holds no \*.safetensors"),
    ],
)
def test_a_folder_that_is_no_model_is_called_what_it_is(tmp_path: Path, file: str, says: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(UserError, match=says):
        HfFolder(tmp_path)
