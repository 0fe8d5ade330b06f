"""LLaVA-OneVision in and out: tiled images, newlines, maps that are cropped and reduced; several images, one, none."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers.image_processing_utils import select_best_resolution

from megavlm.arch.image_tokens import TileGroup, tokens_per_tiled_image
from megavlm.checkpoint.hf.pretrained import Pretrained
from megavlm.errors import UserError
from megavlm.families.llava_onevision import FAMILY as LLAVA_ONEVISION
from megavlm.families.shared.settings import Settings
from megavlm.model.vision_ops import unpad_and_concat
from megavlm.programs import convert
from tests.support import hf
from tests.support.harness import Single
from tests.support.tiny_models.llava_onevision import IMAGES, VIDEOS, VISION, onevision


@pytest.mark.parametrize(
    "options", [{}, {"tied": True, "vision_feature_layer": -2, "multimodal_projector_bias": False}]
)
def test_logits_gradients_and_training(options: dict[str, Any], single: Single, tmp_path: Path) -> None:
    theirs = onevision(**options)
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, IMAGES)
    hf.assert_same_training(folder, theirs, single, IMAGES)


def test_videos(single: Single, tmp_path: Path) -> None:
    theirs = onevision()
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, VIDEOS)
    hf.assert_same_training(folder, theirs, single, VIDEOS)
    config = hf.config_for(folder)
    with pytest.raises(UserError, match="videos of one length at a time"):
        LLAVA_ONEVISION.inputs(hf.batch_of(config, [[(1, 12, 12)], [(2, 12, 12)]]), config.model)  # type: ignore[misc]


def test_round_trip_and_generation(tmp_path: Path) -> None:
    """With layers that do not run, the last norm and the pooling head, which an export returns as they came."""
    folder = hf.save(onevision(vision_feature_layer=-2), tmp_path / "hf")
    weights = load_file(folder / "model.safetensors")
    assert {"vision_tower.head.probe", "vision_tower.encoder.layers.2.mlp.fc1.bias"} <= weights.keys()
    hf.assert_round_trip(folder, tmp_path)
    tokens = torch.tensor([[1, 5, *[60] * 21, 7, 9]])
    pixels = torch.randn(2, 3, 12, 12)
    sizes = torch.tensor([[12, 12]])
    hf.assert_same_generation(folder, tmp_path, input_ids=tokens, pixel_values=pixels, image_sizes=sizes)


def test_verify_tiles_images_as_the_model_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Transformers' model looks for the best of its own resolutions: here none of one tile, which an image as large as
    the tower would be.
    """
    side = VISION["image_size"]
    model = onevision()
    model.config.image_grid_pinpoints = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side], [3 * side, side]]
    folder = hf.save(model, tmp_path / "hf")
    assert convert.main(["verify", str(folder)]) == 0
    assert "largest logit difference" in capsys.readouterr().out
    assert LLAVA_ONEVISION.tiling is not None
    assert LLAVA_ONEVISION.tiling(Settings({"vision_config": {}}, "config.json"))((378, 378)) == (1, 1)


def test_verify_says_what_transformers_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images divided otherwise than the model divides them."""
    folder = hf.save(onevision(), tmp_path / "hf")
    monkeypatch.setattr(Pretrained, "tiling", property(lambda pretrained: lambda size: (1, 2)))
    assert convert.main(["verify", str(folder)]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "Transformers' llava_onevision does not take images of 3×3, 3×3, 3×3 patches" in message


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"vision_aspect_ratio": "anyres"}, "vision_aspect_ratio = 'anyres' is not supported: only anyres_max_N"),
        ({"vision_feature_layer": [-2, -1]}, "features of several layers are not known here"),
        ({"vision_feature_select_strategy": "default"}, "SigLIP has no class token to drop"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "only SigLIP towers are known here"),
    ],
)
def test_what_cannot_be_expressed_is_refused(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        LLAVA_ONEVISION.config(Settings(values, "config.json"))


def test_published_sizes_and_defaults() -> None:
    """384 pixels are 27 patches of 14 and 6 pixels that the tower does not see."""
    tower = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
    model = LLAVA_ONEVISION.config(Settings({"vision_config": tower}, "config.json"))
    assert (model.vision.image_size, model.vision.feature_layer, model.vision.post_norm) == (27 * 14, -1, False)
    assert (model.projector.anyres_max_tiles, model.language.add_qkv_bias, model.image_token) == (9, True, 151646)


@pytest.mark.parametrize(("side", "max_tiles"), [(27, 9), (14, 4), (5, 2)])
@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(8, 3000), st.integers(8, 3000)), min_size=1, max_size=3))
def test_features_lie_as_in_the_reference(side: int, max_tiles: int, sizes: list[tuple[int, int]]) -> None:
    pixels = 14 * side
    pinpoints = [[pixels * rows, pixels * columns] for rows in range(1, 7) for columns in range(1, 7)]
    groups = [TileGroup((0, 0), (30, 40))]
    for size in sizes:
        height, width = select_best_resolution(size, pinpoints)
        groups.append(TileGroup((height // pixels, width // pixels), size))
    tiles = [torch.randn(group.tiles, side**2, 2) for group in groups]
    newline = torch.randn(2)
    model = SimpleNamespace(
        config=SimpleNamespace(
            vision_config=SimpleNamespace(image_size=pixels, patch_size=14), image_grid_pinpoints=pinpoints
        )
    )
    theirs, lengths = transformers.LlavaOnevisionModel.pack_image_features(
        model, tiles, [group.size for group in groups], newline, f"anyres_max_{max_tiles}"
    )
    features = torch.cat(tiles).flatten(0, 1)
    counts = [side**2] * sum(group.tiles for group in groups)
    ours = unpad_and_concat(features, groups, counts, newline=newline, max_tiles=max_tiles)
    assert torch.equal(ours, torch.cat(theirs))
    assert [tokens_per_tiled_image(group, side, max_tiles=max_tiles) for group in groups] == lengths.tolist()
