"""Layers that predict further tokens: loss and gradients of a reference, and files in and out."""

from __future__ import annotations

from pathlib import Path

import pytest

from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained
from tests.support import hf
from tests.support.harness import Single
from tests.support.predictors import losses_of, with_predictor
from tests.support.tiny_models import images_of, tiny

PREDICTING = ("--set", "model.language.mtp_layers=1", "model.objective.mtp_loss_scaling_factor=0.3")
FAMILIES = ("qwen3.5", "glm4v-moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3.5-moe",)))


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_gradients_and_files(name: str, single: Single, tmp_path: Path) -> None:
    """The features of images take the place of their tokens' embeddings one position further on, too."""
    theirs = with_predictor(tiny(name))
    folder = hf.save(theirs, tmp_path / "hf")
    config = hf.config_for(folder, flags=PREDICTING)
    engine = hf.engine_for(config, folder, single)
    chunk = engine.chunks[0].module
    shapes = hf.unpadded_shapes(chunk, config)
    for number, images in enumerate(images_of(name)):
        given = hf.batch_of(config, images, seed=number)
        loss, further = losses_of(theirs, folder, given, config)
        theirs.zero_grad()
        tokens = float(given.text.loss_mask.sum())
        ((loss + 0.3 * further) / tokens).backward()
        engine.optimizer.zero_grad()
        found, counted, beside = engine.schedule.train([given]).tolist()
        assert counted == tokens
        assert found == pytest.approx(loss.item(), rel=1e-6)
        assert beside == pytest.approx(further.item(), rel=1e-6)
        gradients = Pretrained.of(hf.save_gradients(theirs, tmp_path / f"gradients{number}"), *ALL_PARTS, predictors=1)
        ours = hf.gradients_of(chunk, tokens)
        hf.assert_same_gradients(ours, gradients, shapes, "further", "gradients", tolerance=1e-4)
    hf.assert_round_trip(folder, tmp_path, single, flags=PREDICTING)
