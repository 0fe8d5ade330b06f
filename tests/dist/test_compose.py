"""A VLM composed of an encoder and a language model: trains at any layout, and leaves as a LLaVA of Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.internvl import InternVLVisionConfig, InternVLVisionModel

from megavlm.backend import activate
from tests.support.pool import Pools
from tests.support.training import assert_same_curve, farthest_apart, metrics, train_composed

activate()  # before the modules below import megatron-core

from megavlm.cli import convert  # noqa: E402
from megavlm.config.schema import CheckpointConfig, Config  # noqa: E402
from tests.support import hf  # noqa: E402
from tests.support.gates import hold  # noqa: E402
from tests.support.tiny_models.llava import TEXT, VISION, vicuna  # noqa: E402

RUN = [
    *"--precision fp32 --train-iters 5 --global-batch-size 4 --seq-length 40".split(),
    *"--lr 1e-3 --no-tensorboard --image-token 60".split(),
]
CLIP = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION))
SIGLIP = transformers.SiglipModel(transformers.SiglipConfig(vision_config=VISION, text_config=VISION))


@pytest.mark.parametrize(
    ("tower", "layer", "text"),
    [
        pytest.param(CLIP, "-2", transformers.Qwen2Config(**TEXT), id="clip-qwen2"),
        pytest.param(SIGLIP, "-3", transformers.MistralConfig(**TEXT, sliding_window=None), id="siglip-mistral"),
        pytest.param(SIGLIP, "-2", transformers.LlamaConfig(**TEXT), id="siglip-llama", marks=pytest.mark.slow),
        pytest.param(CLIP, "-2", transformers.Qwen3Config(**TEXT), id="clip-qwen3", marks=pytest.mark.slow),
    ],
)
def test_compose_train_and_export(
    pools: Pools,
    tower: transformers.PreTrainedModel,
    layer: str,
    text: transformers.PreTrainedConfig,
    tmp_path: Path,
) -> None:
    vision = hf.save(tower, tmp_path / "vision")
    language = hf.save(transformers.AutoModelForCausalLM.from_config(text), tmp_path / "language")
    argv = [*RUN, "--vision-from", str(vision), "--language-from", str(language), "--vision-feature-layer", layer]
    pools(1).run(train_composed, argv, str(tmp_path / "one"))
    pools(4).run(train_composed, [*argv, *"--tp 2 --pp 2".split()], str(tmp_path / "four"))
    hold_composed(vision, language, tmp_path)

    exported = tmp_path / "exported"
    assert convert.main(["export", str(tmp_path / "four"), str(exported)]) == 0
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(exported)
    assert convert.main(["verify", str(exported), str(tmp_path / "four")]) == 0
    assert torch.isfinite(theirs.lm_head.weight).all()
    assert (exported / "tokenizer_config.json").exists()


@pytest.mark.slow
def test_an_intern_vit_composes(pools: Pools, tmp_path: Path) -> None:
    """Of it and Qwen3 no model of Transformers consists, so it trains and is not exported."""
    tower = InternVLVisionModel(InternVLVisionConfig(**{**VISION, "image_size": [32, 32], "patch_size": [8, 8]}))
    vision = hf.save(tower, tmp_path / "vision")
    text = transformers.Qwen3Config(**TEXT)
    language = hf.save(transformers.AutoModelForCausalLM.from_config(text), tmp_path / "language")
    argv = [*RUN, "--vision-from", str(vision), "--language-from", str(language), "--vision-feature-layer", "-1"]
    pools(1).run(train_composed, argv, str(tmp_path / "one"))
    pools(4).run(train_composed, [*argv, *"--tp 2 --pp 2".split()], str(tmp_path / "four"))
    hold_composed(vision, language, tmp_path)


def hold_composed(vision: Path, language: Path, runs: Path) -> None:
    """Check that four processes have the losses of one, and note the difference in the cards of both folders."""
    four, one = metrics(runs / "four"), metrics(runs / "one")
    assert_same_curve(four, one)
    for folder in (vision, language):
        hold(hf.family_in(folder), "composed", *farthest_apart(four, one))


def test_parts_of_larger_models_compose_whatever_the_rest_of_those_is(pools: Pools, tmp_path: Path) -> None:
    """The tower of a LLaVA and the language model of another: their other halves have other sizes and do not matter."""
    larger = {**TEXT, "num_key_value_heads": 4, "hidden_size": 48, "num_hidden_layers": 3}
    donor = vicuna()
    donor.text_config = transformers.LlamaConfig(**larger)
    vision = hf.save(transformers.LlavaForConditionalGeneration(donor), tmp_path / "vision")
    language = hf.save(transformers.LlavaForConditionalGeneration(vicuna()), tmp_path / "language")
    argv = [*RUN, "--vision-from", str(vision), "--language-from", str(language), "--train-iters", "1"]
    pools(1).run(train_composed, argv, str(tmp_path / "run"))
    exported = tmp_path / "exported"
    assert convert.main(["export", str(tmp_path / "run"), str(exported)]) == 0
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(exported)
    assert theirs.config.text_config.num_key_value_heads == TEXT["num_key_value_heads"]
    assert convert.main(["verify", str(exported), str(tmp_path / "run")]) == 0


def test_an_encoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    from megavlm.checkpoint.hf.pretrained import with_pretrained_model
    from megavlm.errors import UserError

    language = hf.save(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT)), tmp_path / "language")
    options = CheckpointConfig(vision_from=str(language))
    with pytest.raises(UserError, match="is a qwen2 checkpoint, which has no vision"):
        with_pretrained_model(Config(checkpoint=options))
