"""Every Hugging Face family in and out: logits, gradients, training, files, and the number of parameters."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megavlm.arch.kinds import model_parameters
from megavlm.arch.layers import layer_names
from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained
from megavlm.errors import UserError
from megavlm.families import PUBLISHED, published_model
from megavlm.families.llava_onevision import FAMILY as LLAVA_ONEVISION
from megavlm.programs import convert
from tests.support import hf
from tests.support.covering import fast_and_slow, slow
from tests.support.harness import Single, difference
from tests.support.tiny_models import (
    DEEPSEEK,
    GLM_ROPE,
    IMAGES,
    LONGER,
    MODELS,
    PLAIN_LATENTS,
    QWEN3_5,
    QWEN3_MOE,
    VIDEOS,
    config_of,
    images_of,
    tiny,
)

TIED_ALREADY = ("qwen3-vl", "lighton-ocr")
# What a family has in more than one way, beside the models that run at all layouts.
CASES: dict[str, tuple[Callable[[], Any], Any]] = {
    **{name: (partial(tiny, name), images_of(name)) for name in MODELS},
    **{
        f"{name}-{'un' * (name in TIED_ALREADY)}tied": (
            partial(tiny, name, tie_word_embeddings=name not in TIED_ALREADY),
            images_of(name),
        )
        for name in (
            *("llava-next", "pixtral", "qwen2-vl", "qwen2.5-vl", "glm4v", "deepseek-vl", "paddleocr-vl"),
            *TIED_ALREADY,
        )
    },
    **{
        f"{name}-videos": (partial(tiny, name), images_of(name, VIDEOS))
        for name in (
            *("llava-onevision", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3.5", "cosmos3"),
            *("exaone4.5", "minicpmv-4.6", "minicpmv-4.7", "gemma4", "gemma4-unified", "omni3-moe", "muse-glimmer"),
            "kimi-moe",
        )
    },
    # Without the merger inside the tower: a feature has 8 × 8 pixels.
    "minicpmv-4.7-4x": (
        partial(tiny, "minicpmv-4.7", downsample_mode="4x"),
        ([[(16, 24), ((8, 16), (2, 1), (16, 8))], [(24, 8)]], [[], []]),
    ),
    "gemma3-two-tokens": (
        partial(tiny, "gemma3", text={"sliding_window": 2, "layer_types": ["sliding_attention"] * 3}),
        IMAGES["gemma3"],
    ),
    # What --vision-from CLIP and --language-from Qwen3-MoE become.
    "llava-moe": (partial(tiny, "llava", text=QWEN3_MOE), IMAGES["llava"]),
    "llava-latents": (partial(tiny, "llava", text=DEEPSEEK), IMAGES["llava"]),
    "llava-latents-alone": (partial(tiny, "llava", text={**DEEPSEEK, **PLAIN_LATENTS}), IMAGES["llava"]),
    "internvl-moe-normalized": (
        partial(tiny, "internvl-moe", text={"norm_topk_prob": True, "decoder_sparse_step": 2}),
        IMAGES["internvl"],
    ),
    "glm4v-moe-groups": (partial(tiny, "glm4v-moe", text={"n_group": 4, "topk_group": 2}), IMAGES["glm"]),
    # YaRN's factor is one of rotating channels alone.
    **{
        f"{name}-yarn": (
            partial(tiny, name, text={"rope_parameters": {**rope, **LONGER}}),
            images_of(name),
        )
        for name, rope in (("qwen3.5", QWEN3_5["rope_parameters"]), ("glm4v", GLM_ROPE))
    },
}


# Variants have the tables and layers of others: of those the fast set tries one of each kind of video.
LATER = ("minicpmv-4.6", "aya-cohere", "cohere2-vision", "text-llama", "text-qwen3-moe")
FAST = (
    *(name for name in MODELS if name not in LATER),
    *("llava-onevision-videos", "qwen2.5-vl-videos", "qwen3-vl-videos", "gemma4-videos", "kimi-moe-videos"),
    "gemma3-two-tokens",
)
TRAINED = ("llava-tied", "qwen3.5-moe", "glm4v-moe", "text-qwen3")


@pytest.mark.parametrize("name", fast_and_slow(FAST, CASES))
def test_logits_and_gradients(name: str, single: Single, tmp_path: Path) -> None:
    build, images = CASES[name]
    theirs = build()
    hf.assert_same_logits_and_gradients(hf.save(theirs, tmp_path / "hf"), theirs, single, images)


@pytest.mark.parametrize("name", fast_and_slow(TRAINED, CASES))
def test_training(name: str, single: Single, tmp_path: Path) -> None:
    build, images = CASES[name]
    theirs = build()
    hf.assert_same_training(hf.save(theirs, tmp_path / "hf"), theirs, single, images)


def test_videos_of_several_lengths_are_refused_where_transformers_takes_one(tmp_path: Path) -> None:
    config = hf.config_for(hf.save(tiny("llava-onevision"), tmp_path / "hf"))
    with pytest.raises(UserError, match="videos of one length at a time"):
        LLAVA_ONEVISION.inputs(hf.batch_of(config, [[(1, 12, 12)], [(2, 12, 12)]]), config.model)  # type: ignore[misc]


ROUND = [name for name in MODELS if not name.endswith(("-tied", "-6b", "-siglip"))]
VERIFIED = ("internvl", "qwen3.5", "paddleocr-vl", "exaone4.5", "minicpmv-4.7", "paligemma", "aya", "text-qwen3")


@pytest.mark.parametrize("name", [slow(name) if name in LATER else name for name in ROUND])
def test_every_file_comes_back(name: str, single: Single, tmp_path: Path) -> None:
    """Byte for byte, of one file (LLaVA) and of several; with a pooling head and layers that do not run."""
    options = {"vision_feature_layer": -2} if name == "llava-onevision" else {}
    several: dict[str, Any] = {} if name == "llava" else {"max_shard_size": "40KB"}
    folder = hf.save(tiny(name, **options), tmp_path / "hf", **several)
    assert (len(list(folder.glob("*.safetensors"))) > 2) == bool(several)
    hf.assert_round_trip(folder, tmp_path, single)


@pytest.mark.parametrize("name", fast_and_slow(VERIFIED, ROUND))
def test_a_run_is_verified_against_its_folder(name: str, single: Single, tmp_path: Path) -> None:
    folder = hf.save(tiny(name), tmp_path / "hf")
    hf.run_of(folder, tmp_path / "ours", single)
    assert convert.main(["verify", str(folder), str(tmp_path / "ours"), "--samples", "1"]) == 0


@pytest.mark.parametrize("name", ["omni3-moe", slow("omni")])
def test_a_model_that_speaks_is_verified_by_its_thinker(name: str, tmp_path: Path) -> None:
    """Published folders have the thinker's settings and tensors below its name, and name the class of all parts."""
    folder = hf.save(tiny(name), tmp_path / "hf")
    said, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    kind = said["model_type"].removesuffix("_thinker")
    architectures = [each.replace("Thinker", "") for each in said["architectures"]]
    (folder / "config.json").write_text(
        json.dumps({"model_type": kind, "architectures": architectures, "thinker_config": said})
    )
    named = {f"thinker.{each.removeprefix('thinker.')}": tensor for each, tensor in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    assert convert.main(["verify", str(folder), "--samples", "1"]) == 0


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("qwen3.5", ["mtp.layers.0.input_layernorm.weight"]),
        slow("glm-ocr", ["model.language_model.layers.16.eh_proj.weight"]),
        slow("exaone4.5", ["mtp.layers.0.input_layernorm.weight"]),
        slow("omni3-moe", ["talker.model.norm.weight", "code2wav.decoder.0.bias"]),
        ("cosmos3", ["layers.0.self_attn.add_q_proj.weight", "layers.0.mlp_moe_gen.up_proj.weight", "proj_in.bias"]),
    ],
)
def test_what_is_not_trained_is_exported_as_it_was(
    name: str, beside: list[str], single: Single, tmp_path: Path
) -> None:
    """Weights beside the trained model (of MTP layers, of generators of images and sound) are exported unchanged."""
    folder = hf.save(tiny(name), tmp_path / "hf")
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | {other: torch.randn(32) for other in beside}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    hf.assert_round_trip(folder, tmp_path, single)


def test_a_folder_may_say_that_it_is_of_another_type(single: Single, tmp_path: Path) -> None:
    """LightOnOCR was published as of Mistral 3's type: the architecture tells, in a spelling of its own."""
    folder = hf.save(tiny("lighton-ocr"), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    named = {"model_type": "mistral3", "architectures": ["LightOnOCRForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config | named))
    hf.assert_round_trip(folder, tmp_path, single)
    assert convert.main(["verify", str(folder), str(tmp_path / "ours"), "--samples", "1"]) == 0


@pytest.mark.slow
def test_a_merger_that_is_left_out_is_exported_as_it_was(single: Single, tmp_path: Path) -> None:
    folder = hf.save(tiny("minicpmv-4.7", downsample_mode="4x"), tmp_path / "hf")
    hf.assert_round_trip(folder, tmp_path, single)


def as_before_transformers_5(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def as_in_memory(name: str) -> str:
    if name.endswith("lm_head.weight"):
        return "lm_head.weight"
    return "model." + name.replace("language_model.model.", "language_model.")


def as_cosmos_before_diffusers(name: str) -> str:
    name = re.sub(r"self_attn\.norm_([qk])\.", r"self_attn.\1_norm.", name)
    return re.sub(r"self_attn\.to_([qkv])\.", r"self_attn.\1_proj.", name).replace("attn.to_out.", "attn.o_proj.")


def as_kimi_is_published(name: str) -> str:
    name = name.replace("language_model.model.blocks", "language_model.model.layers")
    return name.replace("model.mm_projector", "mm_projector").replace("encoder.patch_embed", "patch_embed")


@pytest.mark.parametrize(
    ("family", "old"),
    [
        *(("llava", as_before_transformers_5), slow("llava", as_in_memory), ("cosmos3", as_cosmos_before_diffusers)),
        ("kimi-moe", as_kimi_is_published),
    ],
)
def test_other_spellings_come_back_as_they_were(family: str, old: Any, single: Single, tmp_path: Path) -> None:
    folder = hf.save(tiny(family), tmp_path / "hf")
    weights = {old(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    hf.assert_round_trip(folder, tmp_path, single)


def test_a_tower_that_rotates_halves_is_read_as_one_that_rotates_neighbours(single: Single, tmp_path: Path) -> None:
    """Transformers permutes the rows of Kimi's queries and keys as it loads them; a folder may have them so."""
    theirs = tiny("kimi-moe")
    folder = hf.save(theirs, tmp_path / "hf")
    theirs.save_pretrained(tmp_path / "loaded", save_original_format=False)
    pretrained = [Pretrained.of(each, *ALL_PARTS) for each in (folder, tmp_path / "loaded")]
    assert not pretrained[1].problems()
    for leaf, shape in (("weight", (144, 48)), ("bias", (144,))):
        key, whole = f"vision.layers.1.self_attention.linear_qkv.{leaf}", tuple(slice(0, size) for size in shape)
        one, other = (each.read_slice(key, shape, whole) for each in pretrained)
        assert torch.equal(one, other)
    hf.assert_round_trip(tmp_path / "loaded", tmp_path, single)


def test_kimi_vl_is_kimi_k25_under_other_names(single: Single, tmp_path: Path) -> None:
    folder, other = hf.save(tiny("kimi-moe"), tmp_path / "hf"), tmp_path / "vl"
    shutil.copytree(folder, other)
    weights = {as_kimi_is_published(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    for old, new in (("0", "linear_1"), ("2", "linear_2")):
        for leaf in ("weight", "bias"):
            weights[f"multi_modal_projector.{new}.{leaf}"] = weights.pop(f"mm_projector.proj.{old}.{leaf}")
    weights = {re.sub(r"^mm_projector", "multi_modal_projector", name): each for name, each in weights.items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    tower = said["vision_config"]
    tower |= {f"init_pos_emb_{side}": tower.pop(f"pos_emb_{side}") for side in ("height", "width")}
    del said["tie_word_embeddings"], tower["pos_emb_time"]
    (other / "config.json").write_text(json.dumps({**said, "model_type": "kimi_vl"}, indent=2))
    ours, theirs = Pretrained.of(other, *ALL_PARTS), Pretrained.of(folder, *ALL_PARTS)
    assert (ours.family.name, ours.model) == ("kimi_vl", theirs.model)
    assert ours.problems() == []
    assert ours.table.keys() == theirs.table.keys()
    for key, rule in theirs.table.items():
        for name, known in zip(ours.table[key].hf_names, rule.hf_names, strict=True):
            assert torch.equal(ours.folder.read(name, slice(None)), theirs.folder.read(known, slice(None))), name
    hf.assert_round_trip(other, tmp_path, single)


def test_a_tied_output_layer_may_be_in_the_file_as_well(single: Single, tmp_path: Path) -> None:
    folder = hf.save(tiny("llava-tied"), tmp_path / "hf")
    weights = load_file(folder / "model.safetensors")
    head, embedding = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
    assert head not in weights
    weights[head] = weights[embedding].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    hf.assert_round_trip(folder, tmp_path, single)
    weights[head][3, 5] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (problem,) = Pretrained.of(folder, *ALL_PARTS).problems()
    assert f"{head} differs from {embedding}, to which tie_word_embeddings ties it" in problem
    weights[head] += 1  # as Transformers 5 saves what its configuration ties, and its weights do not
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert Pretrained.of(folder, *ALL_PARTS).problems() == []
    hf.assert_round_trip(folder, tmp_path / "apart", single)


def test_what_transformers_leaves_out_is_not_surplus(tmp_path: Path) -> None:
    """A second copy of the weights, under Mistral's names, an index of files from before the model was saved again, and
    DeepSeek-V3's layer for a further token.
    """
    config = transformers.AutoConfig.for_model(**DEEPSEEK)
    folder = hf.save(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "hf")
    weights = load_file(folder / "model.safetensors") | {"model.layers.61.eh_proj.weight": torch.zeros(2, 2)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-00001-of-00002.safetensors"}}')
    assert Pretrained.of(folder, *ALL_PARTS).problems() == []


def silent(said: dict[str, Any]) -> dict[str, Any]:
    """As published folders of DeepSeek-VL: Transformers ties by default, but not weights that differ."""
    del said["tie_word_embeddings"], said["text_config"]["tie_word_embeddings"]
    return said


def flat(said: dict[str, Any]) -> dict[str, Any]:
    """As published folders of PaddleOCR-VL: Transformers ties whatever they say, but not weights that differ."""
    return {**said.pop("text_config"), **said, "tie_word_embeddings": False}


@pytest.mark.parametrize(("name", "published"), [("deepseek-vl", silent), ("paddleocr-vl", flat)])
def test_settings_where_published_folders_have_them(name: str, published: Any, single: Single, tmp_path: Path) -> None:
    folder = hf.save(tiny(name, tie_word_embeddings=False), tmp_path / "hf")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(published(said)))
    hf.assert_round_trip(folder, tmp_path, single)
    assert convert.main(["verify", str(folder), str(tmp_path / "ours"), "--samples", "1"]) == 0


def test_experts_as_transformers_saves_what_it_has_read(single: Single, tmp_path: Path) -> None:
    """Transformers transposes what was published, and saves what it has read as it holds it."""
    theirs = transformers.Qwen3VLMoeForConditionalGeneration(config_of("qwen3-vl-moe"))
    folder = hf.save(theirs, tmp_path / "hf")
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        height, width = file.get_slice(name).get_shape()[1:]
    assert height > width
    held = theirs.get_parameter(name)
    pretrained = Pretrained.of(folder, *ALL_PARTS)
    key = "language.layers.0.mlp.experts.experts.linear_fc1.weight"
    assert torch.equal(pretrained.read_slice(key, tuple(held.shape), tuple(slice(0, n) for n in held.shape)), held)
    assert pretrained.problems() == []
    hf.assert_round_trip(folder, tmp_path, single)


def test_the_balance_loss_is_transformers_where_one_layer_has_experts(single: Single, tmp_path: Path) -> None:
    """Transformers pools layers and rows, of which there is one here; coefficients differ by the experts per token."""
    theirs = tiny("qwen3-vl-moe", text={"mlp_only_layers": [0, 1], "output_router_logits": True})
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


# What no feature comes from: pooling heads, the last layer of CLIP and the norm of its class token.
IDLE = {
    "qwen2_5_omni": 7_168,  # embeddings of tokens around sounds
    "gemma4_unified": 2_457_600,  # the embedder of sounds
    "gemma3": 15_238_352,
    "llava": 12_598_272,
    "llava_next": 12_598_272,
    "llava_onevision": 15_240_656,
}
# The number of parameters that is published, to the last one, or to as many digits as are known.
KNOWN = {
    "qwen3_vl_30b_a3b": "31070754032",
    "qwen3_vl_235b_a22b": "235670022896",
    "internvl3_5_20b_a4b": "21.2",
    "internvl3_5_30b_a3b": "30.8",
    "internvl3_5_241b_a28b": "240.7",
    "glm_4_5v": "107.7",
    "qwen3_omni_30b_a3b": "31719205488",
    "lighton_ocr_1b": "1.006",
    "gemma4_12b": "11.95973",
}


@pytest.mark.parametrize("name", [name for name, (family, _) in PUBLISHED.items() if family.parts == ALL_PARTS])
def test_published_models_have_the_parameters_of_transformers(name: str) -> None:
    """The planner counts each parameter that Transformers has, and that is as many as are published."""
    family, values = PUBLISHED[name]
    model = published_model(name)
    tied = {"tie_word_embeddings": model.language.tie_embeddings}
    config = transformers.AutoConfig.for_model(family.model_types[0], **{**values, **tied})
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(config)
    theirs.tie_weights()
    count = theirs.num_parameters()
    assert sum(model_parameters(layer, model) for layer in layer_names(model)) == count - IDLE.get(family.name, 0)
    if name in KNOWN:
        digits = len(KNOWN[name].partition(".")[2])
        assert KNOWN[name] == (f"{count / 1e9:.{digits}f}" if digits else str(count))
