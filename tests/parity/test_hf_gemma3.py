"""Gemma 3 in and out: norms on both sides, windows with positions of their own, images that attend both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megavlm.arch.kinds import layer_cost, model_parameters
from megavlm.arch.layers import layer_names
from megavlm.arch.workload import typical_workload
from megavlm.config.schema import Config, TrainConfig
from megavlm.errors import UserError
from megavlm.families import PUBLISHED, family_of, processor_from, published_model
from megavlm.families.shared.settings import Settings
from tests.support import hf
from tests.support.harness import Single
from tests.support.processors import model_of
from tests.support.tiny_models.gemma3 import IMAGES, gemma3, small


def settings_of(text: dict[str, Any]) -> Settings:
    tower = {"image_size": 896, "patch_size": 14}
    return Settings({"model_type": "gemma3", "vision_config": tower, "text_config": text}, "config.json")


@pytest.mark.parametrize(
    "text", [{}, {"sliding_window": 2, "layer_types": ["sliding_attention"] * 3}], ids=["mixed", "two tokens"]
)
def test_logits_gradients_and_training(text: dict[str, Any], single: Single, tmp_path: Path) -> None:
    theirs = gemma3(**text)
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, IMAGES)
    hf.assert_same_training(folder, theirs, single, IMAGES)


def test_round_trip(tmp_path: Path) -> None:
    folder = hf.save(gemma3(), tmp_path / "hf", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    hf.assert_round_trip(folder, tmp_path)


@pytest.mark.parametrize("name", ["gemma3_4b", "gemma3_27b"])
def test_published_sizes_have_the_parameters_of_transformers(name: str) -> None:
    _, values = PUBLISHED[name]
    model = published_model(name)
    tower = transformers.SiglipVisionConfig(**values["vision_config"], vision_use_head=False)
    with torch.device("meta"):
        theirs = transformers.Gemma3ForConditionalGeneration(
            transformers.Gemma3Config(text_config=values["text_config"], vision_config=tower)
        )
    theirs.tie_weights()
    assert sum(model_parameters(layer, model) for layer in layer_names(model)) == theirs.num_parameters()


def test_layers_with_a_window_cost_less() -> None:
    """Of 34 layers the sixth, twelfth, … see all 32,768 tokens: 16 pairs for each of a window's, but for its start."""
    model = published_model("gemma3_4b")
    work = typical_workload(Config(model=model, train=TrainConfig(seq_length=32768)))
    local, full = (layer_cost(f"language.layers.{number}", model, work).attention_flops for number in (4, 5))
    assert full / local == pytest.approx(16, rel=0.02)
    assert model.language.full_attention_layers == (5, 11, 17, 23, 29)


def test_both_spellings_of_rotary_positions() -> None:
    old = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "layer_types": ["sliding_attention", "full_attention"] * 13,
    }
    read = [settings_of(text) for text in (old, new)]
    one, other = (family_of(settings).config(settings).language for settings in read)
    assert one == other
    assert (one.rotary_base, one.local_rotary_base, one.rope_scaling_factor) == (5e5, 100.0, 8.0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, "rope_parameters"),
    ],
)
def test_what_would_be_computed_differently_is_refused(text: dict[str, Any], named: str) -> None:
    settings = settings_of(text)
    with pytest.raises(UserError, match=named):
        family_of(settings).config(settings)


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_a_window_of_null_is_refused_because_transformers_cannot_run_it(kind: str) -> None:
    """With types of tokens it makes the mask of a window, whether or not a layer uses it. Without the setting, both
    take 4096."""
    theirs = gemma3(sliding_window=None, layer_types=[kind] * 3)
    tokens = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises((TypeError, ValueError)):
        theirs(input_ids=tokens, token_type_ids=torch.zeros_like(tokens))
    settings = Settings(theirs.config.to_dict(), "config.json")
    assert settings.values["text_config"]["sliding_window"] is None
    with pytest.raises(UserError, match="sliding_window = None is not supported"):
        family_of(settings).config(settings)
    absent = settings_of({})
    assert family_of(absent).config(absent).language.window_size == transformers.Gemma3TextConfig().sliding_window


def test_pooling_that_does_not_divide_an_image_is_refused() -> None:
    settings = Settings({**small().to_dict(), "mm_tokens_per_image": 9}, "config.json")
    with pytest.raises(UserError, match="mm_tokens_per_image"):
        family_of(settings).config(settings)


def test_crops_are_refused() -> None:
    options = {"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": True}
    with pytest.raises(UserError, match="do_pan_and_scan"):
        processor_from(options, model_of(14, merge=4))
