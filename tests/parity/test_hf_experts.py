"""Mixtures of experts in and out: Qwen3-VL-MoE, InternVL3.5 with Qwen3-MoE, GLM-4.5V, and how their files differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors import safe_open

from megavlm.arch.kinds import model_parameters
from megavlm.arch.layers import layer_names
from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained, with_pretrained_model
from megavlm.command_line.parsing import parse
from megavlm.config.schema import DataConfig
from megavlm.data.types import Conversation, ImageRef, Turn
from megavlm.errors import UserError
from megavlm.families import PUBLISHED, published_model
from megavlm.programs import convert
from megavlm.programs.inference.assistant import Assistant, Sampling
from tests.support import hf
from tests.support.gates import hold
from tests.support.harness import Single, difference
from tests.support.processors import picture
from tests.support.tiny_models import glm4v, internvl, llava, qwen_vl
from tests.support.whole_models import answer_of_transformers, whole_folder

Models = Callable[[], Any]


def intern(**text: Any) -> Any:
    return transformers.InternVLForConditionalGeneration(internvl.mixture(**text))


def llava_of_experts() -> Any:
    """What --vision-from CLIP and --language-from Qwen3-MoE become."""
    config = llava.vicuna()
    parts = {"vision_config": config.vision_config, "text_config": internvl.mixture().text_config}
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**parts, image_token_index=60))


MODELS: dict[str, tuple[Models, Any]] = {
    "qwen3-vl-moe": (qwen_vl.qwen3_moe, qwen_vl.IMAGES),
    "qwen3-vl-moe-videos": (qwen_vl.qwen3_moe, qwen_vl.VIDEOS),
    "internvl": (intern, llava.IMAGES),
    "internvl-normalized": (lambda: intern(norm_topk_prob=True, decoder_sparse_step=2), llava.IMAGES),
    "llava": (llava_of_experts, llava.IMAGES),
    "glm4v-moe": (glm4v.glm4v_moe, qwen_vl.IMAGES),
    "glm4v-moe-groups": (lambda: glm4v.glm4v_moe(n_group=4, topk_group=2), qwen_vl.IMAGES),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_gradients_and_training(name: str, single: Single, tmp_path: Path) -> None:
    build, images = MODELS[name]
    theirs = build()
    folder = hf.save(theirs, tmp_path / "hf")
    hf.assert_same_logits_and_gradients(folder, theirs, single, images)
    hf.assert_same_training(folder, theirs, single, images)


def test_the_balance_loss_is_transformers_where_one_layer_has_experts(single: Single, tmp_path: Path) -> None:
    """Transformers pools layers and rows, of which there is one here; coefficients differ by the experts per token."""
    theirs = qwen_vl.qwen3_moe(mlp_only_layers=[0, 1], output_router_logits=True)
    folder = hf.save(theirs, tmp_path / "hf")
    config = hf.config_for(folder)
    balanced = replace(config.model.experts, aux_loss_coeff=0.3 * config.model.experts.router_topk)
    config = replace(config, model=replace(config.model, experts=balanced))
    engine, given = hf.engine_for(config, folder, single), hf.batch_of(config, ((),))
    ((count, trained),) = given.text.row_counts
    mask = (torch.arange(config.train.seq_length) < count)[None]
    assert not mask.all(), "padding must not count"

    found = theirs(given.text.tokens, attention_mask=mask.long(), use_cache=False)
    labels = torch.where(given.text.loss_mask.bool(), given.text.labels, -100)
    loss = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
    (loss + 0.3 * found.aux_loss).backward()
    engine.optimizer.zero_grad()
    engine.schedule.train([given])
    ours = hf.gradients_of(engine.chunks[0].module, trained)
    gradients = Pretrained.of(hf.save_gradients(theirs, folder / "gradients"), *ALL_PARTS)
    for layer in ("language.layers.2.mlp.router", "language.layers.0.mlp.linear_fc1"):
        value = ours[f"{layer}.weight"]
        wanted = gradients.read_slice(f"{layer}.weight", tuple(value.shape), tuple(slice(0, n) for n in value.shape))
        assert difference(value, wanted, layer) < 1e-4


@pytest.mark.parametrize("name", ["qwen3-vl-moe", "internvl", "glm4v-moe"])
def test_round_trip_and_verify(name: str, tmp_path: Path) -> None:
    folder = hf.save(MODELS[name][0](), tmp_path / "hf", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    hf.assert_round_trip(folder, tmp_path)
    assert convert.main(["verify", str(folder), str(tmp_path / "ours"), "--samples", "1"]) == 0


def test_a_run_says_how_experts_are_balanced_and_the_folder_what_they_are(tmp_path: Path) -> None:
    folder = str(hf.save(qwen_vl.qwen3_moe(), tmp_path / "hf"))
    experts = with_pretrained_model(parse(["--init-from", folder, "--moe-aux-loss-coeff", "0.01"])).model.experts
    assert (experts.num_experts, experts.dense_layers, experts.aux_loss_coeff) == (6, (1,), 0.01)
    with pytest.raises(UserError, match=r"model.experts.router_topk 3 contradicts .*, which has 2: leave it out"):
        with_pretrained_model(parse(["--init-from", folder, "--set", "model.experts.router_topk=3"]))


@pytest.mark.parametrize("kind", [qwen_vl.AsPublished, transformers.Qwen3VLMoeForConditionalGeneration])
def test_both_ways_in_which_qwen3_vl_has_been_saved(kind: type, tmp_path: Path) -> None:
    """Transformers transposes what was published, and saves what it has read as it holds it."""
    theirs = qwen_vl.qwen3_moe(kind=kind)
    folder = hf.save(theirs, tmp_path / "hf")
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        height, width = file.get_slice(name).get_shape()[1:]
    assert (height < width) == (kind is qwen_vl.AsPublished)
    held = theirs.get_parameter(name)
    pretrained = Pretrained.of(folder, *ALL_PARTS)
    key = "language.layers.0.mlp.experts.experts.linear_fc1.weight"
    assert torch.equal(pretrained.read_slice(key, tuple(held.shape), tuple(slice(0, n) for n in held.shape)), held)
    assert pretrained.problems() == []
    hf.assert_round_trip(folder, tmp_path)


@pytest.mark.parametrize("name", ["qwen3-vl-moe", "glm4v-moe"])
def test_greedy_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, theirs, processor = whole_folder(name, tmp_path)
    picture_file = tmp_path / "0.png"
    Image.fromarray(picture(60, 90)).save(picture_file)
    assistant = Assistant.load(folder, DataConfig(), device=torch.device("cpu"))
    question = "Which is the largest?"
    prompt = assistant.source.prompt(Conversation((Turn("user", (ImageRef(picture_file), question)),)))
    content = [{"type": "image", "image": Image.open(picture_file)}, {"type": "text", "text": question}]
    wanted = answer_of_transformers(
        theirs,
        processor,
        [{"role": "user", "content": content}],
        ends=assistant.ends,
        never=assistant.source.feature_tokens,
        length=16,
    )
    found = assistant.answers([prompt], Sampling(16))
    hold(hf.family_in(folder), "answers", int(found != [wanted]), f"{found} and Transformers' {wanted!r}")
    assert wanted


# The class, and the published number of parameters: to the last one, or to as many digits as are known.
CLASSES = {
    "qwen3_vl_30b_a3b": (transformers.Qwen3VLMoeForConditionalGeneration, "31070754032"),
    "qwen3_vl_235b_a22b": (transformers.Qwen3VLMoeForConditionalGeneration, "235670022896"),
    "internvl3_5_30b_a3b": (transformers.InternVLForConditionalGeneration, "30.8"),
    "internvl3_5_241b_a28b": (transformers.InternVLForConditionalGeneration, "240.7"),
    "glm_4_5v": (transformers.Glm4vMoeForConditionalGeneration, "107.7"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_published_models_have_as_many_parameters_as_is_published(name: str) -> None:
    """The planner counts each parameter that Transformers has, and that is as many as are published."""
    build, published = CLASSES[name]
    with torch.device("meta"):
        theirs = build(build.config_class(**PUBLISHED[name][1]))
    model = published_model(name)
    count = theirs.num_parameters()
    assert sum(model_parameters(layer, model) for layer in layer_names(model)) == count
    digits = len(published.partition(".")[2])
    assert published == (f"{count / 1e9:.{digits}f}" if digits else str(count))
