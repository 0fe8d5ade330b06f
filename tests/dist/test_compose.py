"""A VLM composed of an encoder and a language model: trains at any layout, and leaves as a LLaVA of Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from megavlm.backend import activate
from tests.support.pool import Pools
from tests.support.training import assert_same_curve, metrics, train_composed

activate()  # before the modules below import megatron-core

from megavlm.cli import convert  # noqa: E402
from megavlm.config.schema import CheckpointConfig, Config  # noqa: E402
from tests.support import hf  # noqa: E402
from tests.support.tiny_models.llava import TEXT, VISION, vicuna  # noqa: E402

RUN = [
    *"--precision fp32 --train-iters 5 --global-batch-size 4 --seq-length 40".split(),
    *"--lr 1e-3 --no-tensorboard --image-token 60".split(),
]


@pytest.mark.parametrize(
    ("tower", "layer"),
    [
        (transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION)), "-2"),
        (transformers.SiglipModel(transformers.SiglipConfig(vision_config=VISION, text_config=VISION)), "-3"),
    ],
    ids=["clip", "siglip"],
)
def test_compose_train_and_export(
    pools: Pools, tower: transformers.PreTrainedModel, layer: str, tmp_path: Path
) -> None:
    vision = hf.save(tower, tmp_path / "vision")
    language = hf.save(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT)), tmp_path / "language")
    argv = [*RUN, "--vision-from", str(vision), "--language-from", str(language), "--vision-feature-layer", layer]
    pools(1).run(train_composed, argv, str(tmp_path / "one"))
    pools(4).run(train_composed, [*argv, *"--tp 2 --pp 2".split()], str(tmp_path / "four"))
    assert_same_curve(metrics(tmp_path / "four"), metrics(tmp_path / "one"))

    exported = tmp_path / "exported"
    assert convert.main(["export", str(tmp_path / "four"), str(exported)]) == 0
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(exported)
    assert convert.main(["verify", str(exported), str(tmp_path / "four")]) == 0
    assert torch.isfinite(theirs.lm_head.weight).all()
    assert (exported / "tokenizer_config.json").exists()


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
