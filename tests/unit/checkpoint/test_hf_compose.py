"""Which compositions are a LLaVA, and may leave as one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megavlm.checkpoint.hf.compose import composed_config
from megavlm.config.schema import ModelConfig, VisionConfig
from megavlm.families.shared.settings import Settings
from megavlm.rules.defaults import resolve_model

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
