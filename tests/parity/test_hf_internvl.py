"""InternVL in and out: both kinds of InternViT, pixel shuffle, Qwen2; sharded files with an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support import hf
from tests.support.harness import Single
from tests.support.tiny_models.internvl import large, small
from tests.support.tiny_models.llava import IMAGES


@pytest.mark.parametrize("build", [small, large])
def test_internvl(build: Any, single: Single, tmp_path: Path) -> None:
    theirs = transformers.InternVLForConditionalGeneration(build())
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, IMAGES)
    hf.assert_same_training(folder, theirs, single, IMAGES)


def test_round_trip_of_several_files_and_generation(tmp_path: Path) -> None:
    theirs = transformers.InternVLForConditionalGeneration(small())
    folder = hf.save(theirs, tmp_path / "hf", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    hf.assert_round_trip(folder, tmp_path)
    tokens = torch.tensor([[1, 5, *[60] * 4, 7, 9]])
    hf.assert_same_generation(folder, tmp_path, input_ids=tokens, pixel_values=torch.randn(1, 3, 32, 32))
