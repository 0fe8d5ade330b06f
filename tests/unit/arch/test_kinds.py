"""The two tables of layer kinds: complete, or the import fails."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from megavlm.arch.kind import LayerKind
from megavlm.arch.kinds import KINDS
from megavlm.arch.layers import (
    DEEPSTACK,
    MTP_INPUT,
    MTP_NORM,
    PART_OF_KIND,
    VISION_MERGER,
    kind_of,
    layer_names,
    number_of,
    part_of,
)
from megavlm.config.schema import Config


@pytest.mark.parametrize("half", ["megavlm.arch.kinds", "megavlm.model.layer_kinds"])
def test_a_kind_without_an_entry_fails_at_import(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(half)
    with monkeypatch.context() as patch:
        patch.setitem(PART_OF_KIND, "resampler", "projector")
        with pytest.raises(TypeError, match="resampler"):
            importlib.reload(module)
    importlib.reload(module)


def test_a_kind_without_an_answer_cannot_be_made() -> None:
    resampler: Any = type("Resampler", (LayerKind,), {"parameters": lambda self, model, tp: 0})
    with pytest.raises(TypeError, match="saved_bytes"):
        resampler()


def test_every_kind_is_in_the_list_of_layers() -> None:
    names = layer_names(Config().model)
    # Qwen3-VL has the first, MiniCPM-V the second, and models that predict further tokens have the others.
    assert {kind_of(name) for name in names} == KINDS.keys() - {DEEPSTACK, VISION_MERGER, MTP_INPUT, MTP_NORM}


@pytest.mark.parametrize(
    ("key", "kind", "number", "part"),
    [
        ("vision.layers.13", "vision.layers.", 13, "vision"),
        ("vision.layers.1.self_attention.linear_qkv.weight", "vision.layers.", 1, "vision"),
        ("vision.norm", "vision.norm", 0, "vision"),
        ("deepstack.2.norm.bias", "deepstack.", 2, "projector"),
        ("projector.image_newline", "projector", 0, "projector"),
        ("language.norm.weight", "language.norm", 0, "language"),
        ("language.mtp.1.projection.weight", "language.mtp.", 1, "language"),
        ("language.mtp_norm.0.weight", "language.mtp_norm.", 0, "language"),
        ("output.linear.weight", "output", 0, "language"),
    ],
)
def test_a_name_says_kind_number_and_part(key: str, kind: str, number: int, part: str) -> None:
    assert (kind_of(key), number_of(key), part_of(key)) == (kind, number, part)
