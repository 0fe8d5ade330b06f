"""Which compositions are a LLaVA, and may leave as one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megavlm.checkpoint.hf.compose import is_llava
from megavlm.config.schema import ModelConfig, VisionConfig

MODEL = ModelConfig(vision=VisionConfig(post_norm=False))


def origins(*families: str) -> Any:
    parts = (("vision",), ("language",))
    return [SimpleNamespace(parts=p, family=SimpleNamespace(name=n)) for p, n in zip(parts, families, strict=True)]


def test_clip_or_siglip_with_a_plain_mlp_is_a_llava() -> None:
    assert is_llava(origins("siglip", "text"), MODEL)
    assert not is_llava(origins("internvl_vision", "text"), MODEL)
    assert not is_llava(origins("siglip", "text"), replace(MODEL, vision=VisionConfig(post_norm=True)))


@pytest.mark.parametrize(
    "other",
    [{"kind": "linear"}, {"pixel_shuffle": 2}, {"input_norm": True}, {"hidden_size": 8}, {"anyres_max_tiles": 4}],
)
def test_another_projector_is_no_llava(other: dict[str, Any]) -> None:
    assert not is_llava(origins("siglip", "text"), replace(MODEL, projector=replace(MODEL.projector, **other)))
