"""Towers of Transformers by themselves, and ours from their folders: the same outputs and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.internvl import InternVLVisionConfig, InternVLVisionModel

from megavlm.arch.image_tokens import grid_of
from megavlm.arch.layers import PROJECTOR, layer_names
from megavlm.checkpoint.hf.importing import load_weights
from megavlm.checkpoint.hf.pretrained import Pretrained, with_pretrained_model
from megavlm.command_line.parsing import parse
from megavlm.inputs.batch import ImageBatch, ImageSizes, MicroBatch
from megavlm.inputs.patches import patchify
from megavlm.rules.defaults import resolve
from tests.support import hf
from tests.support.gates import hold
from tests.support.harness import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, Single, assert_same, difference, random_image

TOWER: dict[str, Any] = {
    **{"hidden_size": 48, "num_attention_heads": 3, "image_size": 32, "patch_size": 8, "intermediate_size": 80},
    **{"num_hidden_layers": 4, "attn_implementation": "eager"},
}
INTERN = {**TOWER, "image_size": [32, 32], "patch_size": [8, 8]}
TOWERS = {
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER, hidden_act="quick_gelu")),
    # A last norm, which features of a whole InternVL do not pass.
    "internvit-300m": lambda: InternVLVisionModel(
        InternVLVisionConfig(
            **INTERN,
            **{"norm_type": "layer_norm", "attention_bias": True, "use_mean_pooling": False},
            tie_last_hidden_states=True,
        )
    ),
}
TEXT = transformers.LlamaConfig(
    **{"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4}
)


def ours_of(theirs: Any, single: Single, root: Path) -> tuple[Any, Any, Pretrained]:
    """Return a chunk of a tower's layers with the weights of a folder, its configuration, and the folder."""
    folder = hf.save(theirs, root / "hf")
    language = hf.save(transformers.AutoModelForCausalLM.from_config(TEXT), root / "other")
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
