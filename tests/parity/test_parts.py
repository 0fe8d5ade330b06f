"""Parts of larger models: what a run takes out of a folder has its names there again, whatever it is combined with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from megavlm.arch.layers import part_of
from megavlm.checkpoint.hf.pretrained import Pretrained, with_pretrained_model
from megavlm.config.schema import CheckpointConfig, Config
from megavlm.rules.defaults import resolve
from tests.support import hf
from tests.support.covering import fast_and_slow
from tests.support.tiny_models import FAMILIES, SINGLE, TEXT, TOWER

FAST = ("internvl", "qwen2.5-vl")


@pytest.mark.parametrize("name", fast_and_slow(FAST, SINGLE))
def test_a_part_has_the_names_of_its_folder(name: str, tmp_path: Path) -> None:
    """An export in parts asks a folder's family for the names of a model of which the folder has one part."""
    whole = hf.save(FAMILIES[name][0](), tmp_path / "whole")
    tower = hf.save(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER)), tmp_path / "tower")
    text = hf.save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)), tmp_path / "text")
    for part, sources in (("vision", (whole, text)), ("language", (tower, whole))):
        vision, language = map(str, sources)
        given = Config(checkpoint=CheckpointConfig(vision_from=vision, language_from=language))
        model = replace(given.model, image_token=60, projector=replace(given.model.projector, kind="qformer"))
        config = resolve(with_pretrained_model(replace(given, model=model)))
        found = Pretrained.of(whole, part)
        names = found.family.table(config.model, found.family.name_prefixes[found.variant])
        ours, theirs = ({key: each[key] for key in each if part_of(key) == part} for each in (names, found.table))
        assert ours == theirs
        assert len(ours) > 5
