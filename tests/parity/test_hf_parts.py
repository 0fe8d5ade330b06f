"""Towers by themselves, parts of larger models, and layers that predict further tokens: as in Transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.internvl import InternVLVisionConfig, InternVLVisionModel

from megavlm.arch.image_tokens import grid_of
from megavlm.arch.layers import PROJECTOR, layer_names, part_of
from megavlm.checkpoint.hf.importing import load_weights
from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained, with_pretrained_model
from megavlm.command_line.parsing import parse
from megavlm.config.schema import CheckpointConfig, Config
from megavlm.inputs.batch import ImageBatch, ImageSizes, MicroBatch
from megavlm.inputs.patches import patchify
from megavlm.rules.defaults import resolve
from tests.support import hf
from tests.support.covering import fast_and_slow
from tests.support.gates import hold
from tests.support.harness import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, Single, assert_same, difference, random_image
from tests.support.predictors import losses_of, with_predictor
from tests.support.tiny_models import FAMILIES, SINGLE, TEXT, TOWER, images_of, tiny

SEEING = {**TOWER, "attn_implementation": "eager"}
INTERN = {**SEEING, "image_size": [32, 32], "patch_size": [8, 8]}
TOWERS = {
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SEEING, hidden_act="quick_gelu")),
    # A last norm, which features of a whole InternVL do not pass.
    "internvit-300m": lambda: InternVLVisionModel(
        InternVLVisionConfig(
            **INTERN,
            **{"norm_type": "layer_norm", "attention_bias": True, "use_mean_pooling": False},
            tie_last_hidden_states=True,
        )
    ),
}


def ours_of(theirs: Any, single: Single, root: Path) -> tuple[Any, Any, Pretrained]:
    """Return a chunk of a tower's layers with the weights of a folder, its configuration, and the folder."""
    folder = hf.save(theirs, root / "hf")
    language = hf.save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)), root / "other")
    argv = ["--vision-from", str(folder), "--language-from", str(language), "--image-token", "60"]
    config = resolve(with_pretrained_model(parse([*argv, "--precision", "fp32"])))
    names = layer_names(config.model)
    chunk = single.chunk(config, names[: names.index(PROJECTOR)], vocab_size=61)
    pretrained = Pretrained.of(folder, "vision")
    load_weights([chunk], [pretrained], config, vocab_size=61)
    return chunk, config, pretrained


def assert_alike(ours: Tensor, theirs: Tensor, chunk: Any, config: Any, pretrained: Pretrained, model: Any) -> None:
    """Outputs, and the gradient of every parameter in a random direction, are those of Transformers."""
    family = pretrained.family.name
    assert_same(ours, theirs, tolerance=OUTPUT_TOLERANCE, what="outputs")
    hold(family, "logits", difference(ours, theirs, "outputs"))
    direction = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(4))
    (ours * direction).sum().backward()
    (theirs * direction).sum().backward()
    gradients = Pretrained.of(hf.save_gradients(model, pretrained.folder.path / "gradients"), *pretrained.parts)
    shapes, found = hf.unpadded_shapes(chunk, config), hf.gradients_of(chunk)
    hf.assert_same_gradients(found, gradients, shapes, family, "gradients", tolerance=GRADIENT_TOLERANCE)


@pytest.mark.parametrize(("name", "height", "width"), [("internvit-300m", 32, 32), ("clip", 48, 48), ("clip", 24, 56)])
def test_a_tower_equals_transformers(name: str, height: int, width: int, single: Single, tmp_path: Path) -> None:
    """Images of other sizes than the tower's have interpolated positions."""
    model = TOWERS[name]()
    chunk, config, pretrained = ours_of(model, single, tmp_path)
    images = [random_image(height, width, seed=seed) for seed in (2, 3)]
    sizes = ImageSizes((grid_of(height, width, 8),) * 2)
    patches = torch.cat([patchify(image, 8) for image in images])
    features = chunk(MicroBatch.of_images(ImageBatch(sizes, patches)))[:, 0].unflatten(0, (2, -1))
    pixels = (torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    options = {} if (height, width) == (32, 32) else {"interpolate_pos_encoding": True}
    expected = model(pixels, output_hidden_states=True, **options).hidden_states[config.model.vision.feature_layer]
    expected = expected[:, expected.shape[1] - features.shape[1] :]
    assert_alike(features, expected, chunk, config, pretrained, model)


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


PREDICTING = ("--set", "model.language.mtp_layers=1", "model.objective.mtp_loss_scaling_factor=0.3")
PREDICT = ("qwen3.5", "glm4v-moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3.5-moe",)))


@pytest.mark.parametrize("name", PREDICT)
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
