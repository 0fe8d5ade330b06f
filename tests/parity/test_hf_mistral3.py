"""Mistral 3 in and out: a norm of single patches, a learned merger of blocks, Pixtral's tower and Mistral."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megavlm.arch.kinds import model_parameters
from megavlm.arch.layers import layer_names
from megavlm.errors import UserError
from megavlm.families import PUBLISHED, family_of, published_model
from megavlm.families.shared.settings import Settings
from tests.support import hf
from tests.support.harness import Single
from tests.support.tiny_models.mistral3 import IMAGES, YARN, ministral3, mistral3


@pytest.mark.parametrize("build", [mistral3, ministral3])
def test_logits_gradients_and_training(build: Callable[[], Any], single: Single, tmp_path: Path) -> None:
    theirs = build()
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, IMAGES)
    hf.assert_same_training(folder, theirs, single, IMAGES)


def test_round_trip(tmp_path: Path) -> None:
    folder = hf.save(mistral3(), tmp_path / "hf", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    hf.assert_round_trip(folder, tmp_path)


def test_the_published_size_has_the_parameters_of_transformers() -> None:
    _, values = PUBLISHED["mistral_small_3_24b"]
    model = published_model("mistral_small_3_24b")
    with torch.device("meta"):
        theirs = transformers.Mistral3ForConditionalGeneration(
            transformers.Mistral3Config(
                text_config=transformers.MistralConfig(**values["text_config"]),
                vision_config=transformers.PixtralVisionConfig(**values["vision_config"]),
                tie_word_embeddings=False,
            )
        )
    assert sum(model_parameters(layer, model) for layer in layer_names(model)) == theirs.num_parameters()


@pytest.mark.parametrize(
    ("top", "text", "tied"), [({}, {}, False), ({}, {"tie": True}, True), ({"tie": False}, {"tie": True}, False)]
)
def test_where_files_say_that_embeddings_are_tied(top: dict[str, Any], text: dict[str, Any], tied: bool) -> None:
    """Files of Mistral Small 3.1 say nothing of it, and are not; those of small models say it of the text."""
    sections = [{f"{name}_word_embeddings": value for name, value in given.items()} for given in (top, text)]
    values = {**sections[0], "text_config": sections[1], "vision_config": {"hidden_act": "silu"}}
    settings = Settings({"model_type": "mistral3", **values}, "config.json")
    assert family_of(settings).config(settings).language.tie_embeddings is tied


def test_yarn_is_read_as_transformers_computes_it() -> None:
    """The length up to which Ministral's queries are as ours, and the factor of scores where no scales are given."""
    settings = Settings(ministral3().config.to_dict(), "config.json")
    language = family_of(settings).config(settings).language
    assert language.max_positions == YARN["original_max_position_embeddings"]
    settings.values["text_config"]["rope_parameters"] = {**YARN, "mscale": None, "beta_fast": None}
    plain = family_of(settings).config(settings).language
    assert plain.softmax_scale == pytest.approx((0.1 * math.log(4) + 1) ** 2 / math.sqrt(10))
    assert plain.rope_beta_fast == 32
    settings.values["text_config"]["rope_parameters"] = {**YARN, "truncate": False}
    with pytest.raises(UserError, match="rope_parameters"):
        family_of(settings).config(settings)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"vision_config": {"model_type": "siglip_vision_model", "hidden_act": "silu"}}, "model_type"),
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer"),
        ({"projector_hidden_act": "silu"}, "projector_hidden_act"),
    ],
)
def test_what_would_be_computed_differently_is_refused(values: dict[str, Any], named: str) -> None:
    settings = Settings({"model_type": "mistral3", "vision_config": {"hidden_act": "silu"}, **values}, "config.json")
    with pytest.raises(UserError, match=named):
        family_of(settings).config(settings)
