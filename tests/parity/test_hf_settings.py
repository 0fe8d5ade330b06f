"""How settings of Hugging Face folders are read, and what no model has is refused in one line."""

from __future__ import annotations

import json
import math
import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.image_processing_utils import select_best_resolution
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

from megavlm.arch.image_tokens import TileGroup, tokens_per_tiled_image
from megavlm.arch.kinds import layer_cost
from megavlm.arch.workload import typical_workload
from megavlm.checkpoint.hf.pretrained import Pretrained, with_pretrained_model
from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config, ModelConfig, ProjectorConfig, TrainConfig, VisionConfig
from megavlm.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megavlm.errors import UserError
from megavlm.families import PUBLISHED, VIDEO_READERS, family_of, processor_from, published_model
from megavlm.families.shared.settings import Settings
from megavlm.inference.assistant import check_generation
from megavlm.inputs.reader import VideoReader
from megavlm.inputs.video import Clip
from megavlm.json_files import read_json
from megavlm.model.vision import position_buckets
from megavlm.model.vision_ops import unpad_and_concat
from megavlm.programs import convert
from tests.support import hf, tokenizers
from tests.support.covering import slow
from tests.support.hostile import assert_answered
from tests.support.tiny_models import GEMMA4, GEMMA4_TOWER, GLM_ROPE, PIXTRAL, YARN, config_of, tiny


def read(model_type: str, **values: Any) -> ModelConfig:
    tower = {"vision_config": {"image_size": 896, "patch_size": 14}} if model_type == "gemma3" else {}
    settings = Settings({"model_type": model_type, **tower, **values}, "config.json")
    return family_of(settings).config(settings)


SILU = {"hidden_act": "silu"}
GLM_MOE = {"num_hidden_layers": 4, "n_routed_experts": 16, "first_k_dense_replace": 2}
ARCHITECTURES = [f"{name}ForConditionalGeneration" for name in ("Mistral3", "LightOnOcr", "LightOnOCR")]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llava_onevision", {"vision_aspect_ratio": "anyres"}, "vision_aspect_ratio = 'anyres' is not supported: only"),
    ("llava_onevision", {"vision_feature_layer": [-2, -1]}, "features of several layers are not known here"),
    ("llava_onevision", {"vision_feature_select_strategy": "default"}, "SigLIP has no class token to drop"),
    ("llava_onevision", {"vision_config": {"model_type": "clip_vision_model"}}, "only SigLIP towers are known here"),
    ("gemma3", {"text_config": {"attn_logit_softcapping": 50.0}}, "attn_logit_softcapping"),
    ("gemma3", {"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
    ("gemma3", {"text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention"),
    ("gemma3", {"text_config": {"hidden_activation": "silu"}}, "hidden_activation"),
    ("gemma3", {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}}, "rope_parameters"),
    ("gemma3", {"mm_tokens_per_image": 9}, "mm_tokens_per_image"),
    ("gemma4", {"vision_config": {}, "audio_config": {}}, "audio_config = {} is not supported: Gemma 4 E2B and E4B"),
    ("gemma4", {}, "vision_config = None is not supported: a model without images"),
    *(
        ("gemma4", {"vision_config": GEMMA4_TOWER | tower, "text_config": GEMMA4 | text}, named)
        for tower, text, named in (
            (
                {},
                {"hidden_size_per_layer_input": 256},
                "hidden_size_per_layer_input = 256 is not supported: embeddings",
            ),
            ({}, {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2 is not supported: layers without keys"),
            ({}, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
            ({}, {"per_layer_config": {"0": {"head_dim": 8}}}, "heads are known that are alike in all layers of"),
            ({"use_clipped_linears": True}, {}, "use_clipped_linears = True is not supported: clipped layers"),
            ({"num_key_value_heads": 1}, {}, "num_key_value_heads = 1 is not supported"),
        )
    ),
    ("exaone4_5", {"text_config": {"sliding_window": None}}, "sliding_window = None is not supported"),
    ("exaone4_5", {"text_config": {"layer_types": ["full_attention"]}}, "layers are known with full_attention and"),
    ("aya_vision", {"text_config": {"model_type": "llama"}}, "known language models are cohere and cohere2"),
    ("aya_vision", {"text_config": {"model_type": "cohere", "use_qk_norm": True}}, "use_qk_norm = True is not"),
    ("cohere2_vision", {"text_config": {"sliding_window": None}}, "sliding_window = None is not supported"),
    ("cohere2_vision", {"alignment_intermediate_size": 7}, "alignment_intermediate_size = 7 is not supported"),
    ("paligemma", {"text_config": {"model_type": "gemma"}}, "model_type = 'gemma' is not supported: PaliGemma 2 alone"),
    ("paligemma", {"text_config": {"model_type": "gemma2"}, "projection_dim": 8}, "projection_dim = 8 is not"),
    ("glm4v_moe", {"text_config": {**GLM_MOE, "norm_topk_prob": False}}, "norm_topk_prob = False is not supported"),
    ("glm4v_moe", {"text_config": {**GLM_MOE, "num_experts_per_tok": 1}}, "norm_topk_prob = None is not supported"),
    ("glm4v_moe", {"text_config": {**GLM_MOE, "n_group": 8, "topk_group": 2}}, "topk_group = 2 is not supported"),
    (
        *("qwen3_5", {"text_config": {"hidden_size": 3584, "output_gate_type": "sigmoid"}}),
        "output_gate_type = 'sigmoid' is not supported",
    ),
    ("clip_vision_model", {"patch_size": [14, 16]}, "config.json: patch_size = [14, 16] is not supported: only square"),
    ("glm46v", {"vision_config": {"hidden_act": "gelu"}}, "hidden_act"),
    ("glm46v", {"vision_config": {"out_hidden_size": 2048}}, "out_hidden_size"),
    ("mistral3", {"vision_config": {**SILU, "model_type": "siglip_vision_model"}}, "model_type"),
    ("mistral3", {"vision_config": SILU, "vision_feature_layer": [-2, -1]}, "vision_feature_layer"),
    ("mistral3", {"vision_config": SILU, "projector_hidden_act": "silu"}, "projector_hidden_act"),
    ("llava", {"vision_config": {"model_type": "pixtral", "hidden_act": "gelu"}}, "hidden_act"),
    ("lighton_ocr", {"vision_config": {**SILU, "model_type": "siglip_vision_model"}}, "model_type"),
    ("qianfan_ocr", {"vision_config": {"use_qk_norm": True}}, "use_qk_norm"),
    ("glm_ocr", {"vision_config": {"attention_bias": False}}, "attention_bias"),
    ("kimi_k25", {"vision_config": {"pos_emb_width": 32}}, "pos_emb_width = 32 is not supported"),
    ("kimi_k25", {"vision_config": {"init_pos_emb_time": 8}}, "pos_emb_time = 8 is not supported"),
    ("muse_glimmer", {"vision_config": {"pos_emb_width": 16}}, "pos_emb_width = 16 is not supported"),
    ("muse_glimmer", {"vision_config": {"layer_norm_eps": 1e-6}}, "layer_norm_eps = 1e-06 is not supported"),
    ("muse_glimmer", {"out_hidden_size": 1536}, "out_hidden_size = 1536 is not supported: the projector reads 2×2"),
    ("muse_glimmer", {"text_config": {"sliding_window": None}}, "sliding_window = None is not supported"),
    ("muse_glimmer", {"text_config": {"layer_rope_theta": [0]}}, "layer_rope_theta = [0] is not supported"),
    (
        *("qwen3_omni_moe", {"vision_config": {"out_hidden_size": 2048}, "audio_config": {"n_window": 60}}),
        "n_window = 60 is not supported",
    ),
    ("kimi_k25", {"vision_config": {"mm_projector_type": "patchmergerv2"}}, "mm_projector_type"),
    ("kimi_k25", {"projection_hidden_size": 8}, "projection_hidden_size = 8 is not supported"),
    ("kimi_k25", {"text_config": {"model_type": "llama"}}, "only DeepSeek-V3 is known here"),
]


@pytest.mark.parametrize(("model_type", "values", "named"), REFUSED)
def test_what_would_be_computed_differently_is_refused(model_type: str, values: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=re.escape(named)):
        read(model_type, **values)


@pytest.mark.parametrize("part", ["vision", "projector"])
def test_no_part_of_a_model_that_hears_is_taken_without_its_audio_encoder(part: str, tmp_path: Path) -> None:
    config_of("omni").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has an audio encoder, which would be left out: give the whole model"):
        Pretrained.of(tmp_path, part, weights=False)
    assert Pretrained.of(tmp_path, "language", weights=False).model.audio.num_layers


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_a_window_of_null_is_refused_because_transformers_cannot_run_it(kind: str) -> None:
    """With types of tokens it makes the mask of a window, whether or not a layer uses it. Without the setting, both
    take 4096."""
    theirs = tiny("gemma3", text={"sliding_window": None, "layer_types": [kind] * 3})
    tokens = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises((TypeError, ValueError)):
        theirs(input_ids=tokens, token_type_ids=torch.zeros_like(tokens))
    with pytest.raises(UserError, match="sliding_window = None is not supported"):
        read(**theirs.config.to_dict())
    assert read("gemma3").language.window_size == transformers.Gemma3TextConfig().sliding_window


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl"])
def test_before_transformers_5_the_language_models_settings_were_at_the_top(name: str, tmp_path: Path) -> None:
    folder = hf.save(tiny(name), tmp_path / "hf")
    nested = json.loads((folder / "config.json").read_text())
    flat = {**nested, **nested["text_config"], "model_type": nested["model_type"]}
    rope = flat.pop("rope_parameters")
    del flat["text_config"]
    flat |= {"rope_theta": rope["rope_theta"]}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    assert read(**flat) == read(**nested)


def test_both_spellings_of_gemmas_rotary_positions() -> None:
    old = {
        **{"rope_theta": 5e5, "rope_local_base_freq": 100.0, "sliding_window_pattern": 2},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "layer_types": ["sliding_attention", "full_attention"] * 13,
    }
    one, other = (read("gemma3", text_config=text).language for text in (old, new))
    assert one == other
    assert (one.rotary_base, one.local_rotary_base, one.rope_scaling_factor) == (5e5, 100.0, 8.0)


def test_both_spellings_of_kimis_settings() -> None:
    said = config_of("kimi-moe").to_dict()
    (family, ours) = (family_of(where := Settings(said, "config.json")), family_of(where).config(where))
    tower = said["vision_config"]
    tower |= {f"vt_{name}": tower.pop(name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    tower |= {"vt_num_attention_heads": tower.pop("num_attention_heads"), "mm_hidden_size": 48}
    tower |= {f"init_{name}": tower.pop(name) for name in ("pos_emb_height", "pos_emb_width", "pos_emb_time")}
    tower["projector_ln_eps"] = said.pop("projection_layer_norm_eps")
    said["media_placeholder_token_id"] = said.pop("image_token_id")
    said["text_config"]["model_type"] = "kimi_k2"
    assert family.config(Settings(said, "config.json")) == ours


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_both_spellings_of_what_rotates(place: str) -> None:
    """Transformers 5 writes the share with the frequencies, files from before beside them, with biases of queries."""
    inside = {name: value for name, value in GLM_ROPE.items() if place == "rope_parameters" or name == "mrope_section"}
    beside = {"rope_theta": 100.0, "partial_rotary_factor": 0.5, "attention_bias": True}
    language = read("glm4v", text_config={**(beside if place == "rope_scaling" else {}), place: inside}).language
    assert language.add_qkv_bias
    assert (language.rotary_percent, language.rotary_base, language.mrope_section) == (0.5, 100.0, (1, 1, 1))


@pytest.mark.parametrize(
    ("top", "text", "tied"), [({}, {}, False), ({}, {"tie": True}, True), ({"tie": False}, {"tie": True}, False)]
)
def test_where_files_say_that_embeddings_are_tied(top: dict[str, Any], text: dict[str, Any], tied: bool) -> None:
    """Files of Mistral Small 3.1 say nothing of it, and are not; those of small models say it of the text."""
    sections = [{f"{name}_word_embeddings": value for name, value in given.items()} for given in (top, text)]
    model = read("mistral3", **sections[0], text_config=sections[1], vision_config=SILU)
    assert model.language.tie_embeddings is tied


def test_an_architecture_may_be_another_than_the_type_says() -> None:
    """Published files of LightOnOCR say Mistral 3, and that the architecture is another, whose embeddings are tied."""
    folder = {"model_type": "mistral3", "vision_config": SILU, "text_config": {"model_type": "qwen3"}}
    ties = [read(**folder, architectures=[name]).language.tie_embeddings for name in ARCHITECTURES]
    assert ties == [False, True, True]


def test_yarn_is_read_as_transformers_computes_it() -> None:
    """The length up to which Ministral's queries are as ours, and the factor of scores where no scales are given."""
    values = config_of("ministral3-tied").to_dict()
    assert read(**values).language.max_positions == YARN["original_max_position_embeddings"]
    values["text_config"]["rope_parameters"] = {**YARN, "mscale": None, "beta_fast": None}
    plain = read(**values).language
    assert plain.softmax_scale == pytest.approx((0.1 * math.log(4) + 1) ** 2 / math.sqrt(10))
    assert plain.rope_beta_fast == 32


def test_no_window_is_no_limit() -> None:
    """`"sliding_window": null` is what Pixtral's config.json says; Mistral's own default would be 4,096 tokens."""
    text = {"model_type": "mistral", "sliding_window": None, "max_position_embeddings": 1024000}
    whole = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    assert read("llava", vision_config=PIXTRAL, text_config=text, **whole).language.max_positions == 1024000


def test_defaults_of_onevision() -> None:
    """384 pixels are 27 patches of 14 and 6 pixels that the tower does not see."""
    tower = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
    model = read("llava_onevision", vision_config=tower)
    assert (model.vision.image_size, model.vision.feature_layer, model.vision.post_norm) == (27 * 14, -1, False)
    assert (model.projector.anyres_max_tiles, model.language.add_qkv_bias, model.image_token) == (9, True, 151646)


def test_layers_with_a_window_cost_less() -> None:
    """Of 34 layers the sixth, twelfth, … see all 32,768 tokens: 16 pairs for each of a window's, but for its start."""
    model = published_model("gemma3_4b")
    work = typical_workload(Config(model=model, train=TrainConfig(seq_length=32768)))
    local, full = (layer_cost(f"language.layers.{number}", model, work).attention_flops for number in (4, 5))
    assert full / local == pytest.approx(16, rel=0.02)
    assert model.language.full_attention_layers == (5, 11, 17, 23, 29)


def test_a_run_says_how_experts_are_balanced_and_the_folder_what_they_are(tmp_path: Path) -> None:
    folder = str(hf.save(tiny("qwen3-vl-moe"), tmp_path / "hf"))
    experts = with_pretrained_model(parse(["--init-from", folder, "--moe-aux-loss-coeff", "0.01"])).model.experts
    assert (experts.num_experts, experts.dense_layers, experts.aux_loss_coeff) == (6, (1,), 0.01)
    with pytest.raises(UserError, match=r"model.experts.router_topk 3 contradicts .*, which has 2: leave it out"):
        with_pretrained_model(parse(["--init-from", folder, "--set", "model.experts.router_topk=3"]))


def test_verify_tiles_images_as_the_model_does(tmp_path, monkeypatch, capsys):
    """Transformers' model looks for the best of its own resolutions: here none of one tile, which an image as large as
    the tower would be. Images divided otherwise it does not take.
    """
    resolutions = [[12, 24], [24, 12], [24, 24], [36, 12]]
    folder = hf.save(tiny("llava-onevision", image_grid_pinpoints=resolutions), tmp_path / "hf")
    assert convert.main(["verify", str(folder)]) == 0
    assert "largest logit difference" in capsys.readouterr().out
    monkeypatch.setattr(Pretrained, "tiling", property(lambda pretrained: lambda size: (1, 2)))
    assert convert.main(["verify", str(hf.save(tiny("llava-onevision"), tmp_path / "other"))]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "Transformers' llava_onevision does not take images of 3×3, 3×3, 3×3 patches" in message


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
    tower = SimpleNamespace(image_size=pixels, patch_size=14)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=tower, image_grid_pinpoints=pinpoints))
    theirs, lengths = transformers.LlavaOnevisionModel.pack_image_features(
        model, tiles, [group.size for group in groups], newline, f"anyres_max_{max_tiles}"
    )
    features = torch.cat(tiles).flatten(0, 1)
    counts = [side**2] * sum(group.tiles for group in groups)
    ours = unpad_and_concat(features, groups, counts, newline=newline, max_tiles=max_tiles)
    assert torch.equal(ours, torch.cat(theirs))
    assert [tokens_per_tiled_image(group, side, max_tiles=max_tiles) for group in groups] == lengths.tolist()


@pytest.mark.parametrize("side", [6, 19, 27])
def test_buckets_round_as_the_reference(side: int) -> None:
    """An embedding whose positions are their own numbers shows which one each patch takes; 19 needs equal rounding."""
    tower = {"hidden_size": 1, "num_channels": 1, "image_size": side, "patch_size": 1}
    embeddings = SmolVLMVisionEmbeddings(transformers.SmolVLMConfig(vision_config=tower).vision_config)
    with torch.no_grad():
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(side * side)[:, None])
        for rows, columns in ((side, side), (1, 2 * side), (side + 5, side - 3), (31, 38)):
            mask = torch.ones(1, rows, columns, dtype=torch.bool)
            theirs = embeddings(torch.zeros(1, 1, rows, columns), mask).view(rows, columns)
            ours = position_buckets(rows, side)[:, None] * side + position_buckets(columns, side)
            assert torch.equal(ours.float(), theirs)


WRONG: tuple[Any, ...] = (
    *("64", "x", [], [64, 32], {}, -1, 0, 10**7, 10**12, 10**400, 1.5, float("nan"), float("inf"), True),
)


def sections(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """Places of all settings in a config and its sections."""
    found = []
    for name, value in config.items():
        found.append((name,))
        if isinstance(value, dict):
            found += [(name, *rest) for rest in sections(value)]
    return found


def changed(values: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = place
    return {**values, first: changed(values[first], tuple(rest), value) if rest else value}


CONFIG = config_of("llava").to_dict()


def describe(config: dict[str, Any]) -> None:
    settings = Settings(config, "config.json")
    family = family_of(settings)
    family.table(family.config(settings), family.name_prefixes[0])


@pytest.mark.parametrize("step", [11, slow(1)])
def test_a_setting_of_another_type_or_size_is_one_line(step: int) -> None:
    """Give each setting of each family each wrong value; of all these pairs, take every `step`-th."""
    configs = [CONFIG, *({"model_type": family.model_types[0], **values} for family, values in PUBLISHED.values())]
    cases = [(config, place, value) for config in configs for place in sections(config) for value in WRONG]
    assert len(WRONG) % step or step == 1, "the same values of each setting would be taken"
    for config, place, value in cases[::step]:
        assert_answered(partial(describe, changed(config, place, value)))


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps"]
)
@pytest.mark.parametrize("value", ["64", [64], 10**12, {}, -1, True])
def test_the_line_names_the_file_and_the_setting(name: str, value: Any) -> None:
    settings = Settings(changed(CONFIG, ("text_config", name), value), "theirs/config.json")
    with pytest.raises(UserError, match=rf"^theirs/config.json: text_config: {name} .* must be .*: correct it"):
        family_of(settings).config(settings)


CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
    "do_center_crop": True,
}
QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 1}


@pytest.mark.parametrize(
    "name", ["size", "crop_size", "resample", "rescale_factor", "image_mean", "image_std", "do_resize"]
)
def test_an_option_of_an_image_processor_likewise(name: str) -> None:
    for value in (*WRONG, [0, 0, 0], {"height": 10**9, "width": 10**9}, {"shortest_edge": "x"}, {"shortest_edge": 0}):
        assert_answered(lambda value=value: processor_from({**CLIP, name: value}, ModelConfig()))


READERS = {reader.classes[0]: reader for reader in VIDEO_READERS.values() if reader.classes}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_an_option_of_a_video_processor_likewise(reader: VideoReader) -> None:
    vision = VisionConfig(patch_size=16, temporal_patch_size=2, position_embedding="learned_rope2d")
    side = 4 if "downsample_mode" in reader.defaults else reader.defaults.get("pooling_kernel_size", 2)
    model = ModelConfig(vision=vision, projector=ProjectorConfig(pixel_shuffle=side), video_token=9)
    film = Clip(60, 90, tuple(number / 10 for number in range(20)), 10.0)

    def described(options: dict[str, Any]) -> None:
        given = {"patch_size": 16, "video_processor_type": f"{reader.classes[0]}VideoProcessor", **options}
        videos = processor_from(CLIP, model, video=given).video
        assert videos.layout(film, videos.usual).film is not None

    described({})
    names = ("size", "max_image_size", "resample", "image_std", "fps", "num_frames", "min_frames", "video_sampling")
    for name in names:
        for value in (*WRONG, [0, 0, 0], {"fps": "x"}, {"height": 10**9, "width": 10**9}, {"longest_edge": "x"}):
            assert_answered(partial(described, {name: value}))


@pytest.mark.parametrize(
    "values", [{"max_pixels": 0}, {"min_pixels": "x"}, {"size": {"shortest_edge": 1, "longest_edge": 10**12}}]
)
def test_a_budget_of_pixels_is_one(values: dict[str, Any]) -> None:
    model = ModelConfig()
    options = {**QWEN, "patch_size": model.vision.patch_size, "merge_size": model.projector.pixel_shuffle, **values}
    with pytest.raises(UserError, match="must be"):
        processor_from(options, model)


@pytest.mark.parametrize("content", [b"[" * 10**6, b"{" * 10**6, b"[]", b"7", b'"x"', b"", b"\xff", b'{"a": ' * 10**5])
def test_json_of_any_shape_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json") as caught:
        read_json(tmp_path / "config.json")
    assert len(str(caught.value).splitlines()) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.llama(), eos_token="</s>", bos_token="<s>")
    made.save_pretrained(folder)
    HuggingFaceTokenizer.of(folder)
    return folder


def test_a_tokenizer_file_that_is_none_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "special_tokens_map.json")
    with pytest.raises(UserError, match="cannot be read"):
        HuggingFaceTokenizer.of(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer_file": "ELSEWHERE/tokenizer.json"},
        {"vocab_file": "ELSEWHERE/tokenizer.json", "tokenizer_class": "BertTokenizer"},
        {"fast_tokenizer_files": ["../elsewhere/tokenizer.4.0.0.json"]},
        {"fast_tokenizer_files": ["ELSEWHERE/tokenizer.4.0.0.json"]},
        {"init_inputs": ["ELSEWHERE/tokenizer.json"]},
        {"sp_model_kwargs": {"model_file": "ELSEWHERE/tokenizer.json"}},
    ],
)
def test_a_tokenizer_lies_in_its_folder(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("tokenizer.json", "tokenizer.4.0.0.json"):
        (elsewhere / name).write_bytes((folder / "tokenizer.json").read_bytes())
    given = json.loads((folder / "tokenizer_config.json").read_text())
    named = json.loads(json.dumps(options).replace("ELSEWHERE", str(elsewhere)))
    (folder / "tokenizer_config.json").write_text(json.dumps({**given, **named}))
    with pytest.raises(UserError, match=r"names files by|no plain file name"):
        HuggingFaceTokenizer.of(folder)


def test_no_template_leads_out_of_its_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.jinja").write_text("secret")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").symlink_to(tmp_path / "secret.jinja")
    with pytest.raises(UserError, match="leads out"):
        HuggingFaceTokenizer.of(folder)


def pattern(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("text", ["a" * 100 + "!", "b" * 10_000 + "c"])
@pytest.mark.parametrize("regex", ["(a+)+$", "(b|b)*$", "(b*)*$"])
def test_a_pattern_that_goes_back_and_forth_is_one_line_or_one_sample(folder: Path, regex: str, text: str) -> None:
    described = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**described, "pre_tokenizer": pattern(regex)}))
    assert_answered(lambda: HuggingFaceTokenizer.of(folder).encode(text))


def replaced(times: int) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * times}


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ("normalizer", [replaced(3)] * 3),
        ("normalizer", [{"type": "Prepend", "prepend": "a" * 17}]),
        ("normalizer", [{"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 17}]),
        ("decoder", [replaced(17)]),
    ],
)
def test_a_tokenizer_that_multiplies_texts_is_refused(folder: Path, part: str, steps: list[dict[str, Any]]) -> None:
    described = json.loads((folder / "tokenizer.json").read_text())
    listed = {"normalizer": "normalizers", "decoder": "decoders"}[part]
    nested = {"type": "Sequence", listed: [{"type": "Sequence", listed: steps}]}
    (folder / "tokenizer.json").write_text(json.dumps({**described, part: nested}))
    with pytest.raises(UserError, match=rf"cannot be read \(its {part} makes texts \d+ times as long\)"):
        HuggingFaceTokenizer.of(folder)


@pytest.mark.parametrize("name", ["eos_token_id", "top_k", "top_p"])
@pytest.mark.parametrize("value", ["x", -1, 10**30, [-1, "x"], float("nan")])
def test_what_answers_are_generated_with_is_checked(tmp_path: Path, name: str, value: Any) -> None:
    check_generation(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [1, 2], "top_k": 50, "top_p": 1.0}))
    check_generation(tmp_path)
    file.write_text(json.dumps({name: value}))
    with pytest.raises(UserError, match=rf"generation_config.json: {name} .* must be"):
        check_generation(tmp_path)


def test_a_tokenizer_that_adds_very_many_tokens_is_refused(folder: Path) -> None:
    described = json.loads((folder / "tokenizer.json").read_text())
    mark, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        **{"type": "TemplateProcessing", "single": [mark] * 50 + [text], "pair": [text, text]},
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1] * 50, "tokens": ["<s>"] * 50}},
    }
    (folder / "tokenizer.json").write_text(json.dumps({**described, "post_processor": template}))
    with pytest.raises(UserError, match=r"cannot be read \(its post_processor adds 2500 tokens to each text\)"):
        HuggingFaceTokenizer.of(folder)


@pytest.mark.parametrize(
    "content", ["[" * 10**5, "{}", "[]", "7", '{"model": {"type": "BPE"}}', '{"version": "9"}', ""]
)
def test_a_damaged_tokenizer_is_one_line(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UserError) as caught:
        HuggingFaceTokenizer.of(folder)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_far_larger_than_its_files_is_one_line_before_it_is_made(tmp_path: Path, name: str) -> None:
    """Each setting is one that a model has; a rank would allocate gigabytes before it looked for its tensors."""
    family, values = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family.model_types[0], **values}))
    save_file({"a": torch.ones(4, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"a model of .* is described, and there are .*: complete the files of"):
        Pretrained.of(tmp_path, *family.parts)
