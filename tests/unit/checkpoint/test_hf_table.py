"""Every rule is a rearrangement of rows: nothing is lost, nothing doubled, and slices are slices of the whole."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megavlm.checkpoint.hf.compose import composed_config
from megavlm.config.schema import ModelConfig, VisionConfig
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import QKV, Concat, FusedQKV, Rename, Rule, fits, row_pairs
from megavlm.rules.defaults import resolve_model

GROUPS, HEADS, WIDTH, COLUMNS = 3, 6, 4, 5

RULES: list[tuple[Rule, tuple[int, ...]]] = [
    (Rename("w"), (7, COLUMNS)),
    (Rename("b"), (7,)),
    (Concat(("gate", "up")), (8, COLUMNS)),
    (QKV("{}_proj", groups=GROUPS, head_width=WIDTH), ((HEADS + 2 * GROUPS) * WIDTH, COLUMNS)),
    (QKV("{}_proj", groups=HEADS, head_width=WIDTH), (3 * HEADS * WIDTH,)),
    (FusedQKV("qkv", heads=HEADS), (3 * HEADS * WIDTH, COLUMNS)),
]


def their_tensors(rule: Rule, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Tensors in which every value tells where it was."""
    tensors, first = {}, 0
    for name, size in rule.hf_shapes(shape).items():
        count = torch.Size(size).numel()
        tensors[name] = torch.arange(first, first + count).view(size)
        first += count
    return tensors


def assemble(rule: Rule, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
    tensors = their_tensors(rule, shape)
    out = torch.full((stop - start, *shape[1:]), -1)
    for pair in row_pairs(rule.hf_rows(shape), start, stop):
        out[pair.rows] = tensors[pair.hf_name][pair.hf_rows]
    return out


@pytest.mark.parametrize(("rule", "shape"), RULES)
def test_every_value_of_theirs_is_in_ours_once(rule: Rule, shape: tuple[int, ...]) -> None:
    values = torch.cat([tensor.flatten() for tensor in their_tensors(rule, shape).values()])
    assert torch.equal(assemble(rule, shape, 0, shape[0]).flatten().sort().values, values)
    assert set(rule.hf_names) == set(rule.hf_shapes(shape))


@given(st.sampled_from(RULES), st.data())
def test_a_slice_is_a_slice_of_the_whole(case: tuple[Rule, tuple[int, ...]], data: st.DataObject) -> None:
    rule, shape = case
    start = data.draw(st.integers(0, shape[0] - 1))
    stop = data.draw(st.integers(start + 1, shape[0] + 3))
    whole = assemble(rule, shape, 0, shape[0])
    part = assemble(rule, shape, start, stop)
    assert torch.equal(part[: shape[0] - start], whole[start:stop])
    assert (part[shape[0] - start :] == -1).all(), "rows past the tensor are padding"


def test_fused_equals_apart() -> None:
    shape = (3 * HEADS * WIDTH, COLUMNS)
    apart = assemble(QKV("{}", groups=HEADS, head_width=WIDTH), shape, 0, shape[0])
    assert torch.equal(assemble(FusedQKV("qkv", heads=HEADS), shape, 0, shape[0]), apart)


@pytest.mark.parametrize(
    ("found", "expected", "does"),
    [((1, 17, 24), (1, 17, 24), True), ((17, 24), (1, 17, 24), True), ((24, 17), (17, 24), False), ((8,), (9,), False)],
)
def test_shapes_fit_but_for_dimensions_of_one(found: tuple[int, ...], expected: tuple[int, ...], does: bool) -> None:
    assert fits(found, expected) == does


MODEL = resolve_model(ModelConfig(vision=VisionConfig(post_norm=False)))


def is_llava(vision: str, model: ModelConfig) -> bool:
    def part(name: str, family: str) -> Any:
        folder = SimpleNamespace(settings=Settings({"hidden_size": 8}, "config.json"))
        return SimpleNamespace(parts=(name,), family=SimpleNamespace(name=family), folder=folder)

    config = composed_config([part("vision", vision), part("language", "llama")], model, image_token=1)
    return config is not None and config["model_type"] == "llava"


def test_clip_or_siglip_with_a_plain_mlp_is_a_llava() -> None:
    assert is_llava("siglip", MODEL)
    assert is_llava("llava", MODEL), "its tower is by default CLIP"
    assert not is_llava("internvl_vision", MODEL)
    assert not is_llava("siglip", replace(MODEL, vision=VisionConfig(post_norm=True)))


@pytest.mark.parametrize(
    "other",
    [{"kind": "linear"}, {"pixel_shuffle": 2}, {"input_norm": True}, {"hidden_size": 8}, {"anyres_max_tiles": 4}],
)
def test_another_projector_is_no_llava(other: dict[str, Any]) -> None:
    assert not is_llava("siglip", replace(MODEL, projector=replace(MODEL.projector, **other)))
