"""Files of Hugging Face: rules of names and rows, experts in each spelling, and what models that embed need."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megavlm.checkpoint.hf import hf_files
from megavlm.checkpoint.hf.compose import composed_config
from megavlm.checkpoint.hf.embedding_files import end_texts, read_embedding_file, write_embedding_files
from megavlm.checkpoint.hf.hf_files import HfFolder
from megavlm.checkpoint.hf.pretrained import Pretrained
from megavlm.config.schema import ExpertsConfig, ModelConfig, ObjectiveConfig, VisionConfig
from megavlm.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megavlm.errors import UserError
from megavlm.families import FAMILIES, family_of
from megavlm.families.shared.experts import experts_table
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import QKV, Concat, FusedQKV, Rename, Rule, fits, matches, row_pairs
from megavlm.rules.defaults import resolve_model

GROUPS, HEADS, WIDTH, COLUMNS = 3, 6, 4, 5

RULES: list[tuple[Rule, tuple[int, ...]]] = [
    (Rename("w"), (7, COLUMNS)),
    (Rename("b"), (7,)),
    (Concat(("gate", "up")), (8, COLUMNS)),
    (QKV("{}_proj", groups=GROUPS, head_width=WIDTH), ((HEADS + 2 * GROUPS) * WIDTH, COLUMNS)),
    (QKV("{}_proj", groups=HEADS, head_width=WIDTH), (3 * HEADS * WIDTH,)),
    (FusedQKV("qkv", heads=HEADS), (3 * HEADS * WIDTH, COLUMNS)),
]


def their_tensors(rule: Rule, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Tensors in which every value tells where it was."""
    tensors, first = {}, 0
    for name, size in rule.hf_shapes(shape).items():
        count = torch.Size(size).numel()
        tensors[name] = torch.arange(first, first + count).view(size)
        first += count
    return tensors


def assemble(rule: Rule, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
    tensors = their_tensors(rule, shape)
    out = torch.full((stop - start, *shape[1:]), -1)
    for pair in row_pairs(rule.hf_rows(shape), start, stop):
        out[pair.rows] = tensors[pair.hf_name][pair.hf_rows]
    return out


@pytest.mark.parametrize(("rule", "shape"), RULES)
def test_every_value_of_theirs_is_in_ours_once(rule: Rule, shape: tuple[int, ...]) -> None:
    values = torch.cat([tensor.flatten() for tensor in their_tensors(rule, shape).values()])
    assert torch.equal(assemble(rule, shape, 0, shape[0]).flatten().sort().values, values)
    assert set(rule.hf_names) == set(rule.hf_shapes(shape))


@given(st.sampled_from(RULES), st.data())
def test_a_slice_is_a_slice_of_the_whole(case: tuple[Rule, tuple[int, ...]], data: st.DataObject) -> None:
    rule, shape = case
    start = data.draw(st.integers(0, shape[0] - 1))
    stop = data.draw(st.integers(start + 1, shape[0] + 3))
    whole = assemble(rule, shape, 0, shape[0])
    part = assemble(rule, shape, start, stop)
    assert torch.equal(part[: shape[0] - start], whole[start:stop])
    assert (part[shape[0] - start :] == -1).all(), "rows past the tensor are padding"


def test_fused_equals_apart() -> None:
    shape = (3 * HEADS * WIDTH, COLUMNS)
    apart = assemble(QKV("{}", groups=HEADS, head_width=WIDTH), shape, 0, shape[0])
    assert torch.equal(assemble(FusedQKV("qkv", heads=HEADS), shape, 0, shape[0]), apart)


@pytest.mark.parametrize(
    ("found", "expected", "does"),
    [((1, 17, 24), (1, 17, 24), True), ((17, 24), (1, 17, 24), True), ((24, 17), (17, 24), False), ((8,), (9,), False)],
)
def test_shapes_fit_but_for_dimensions_of_one(found: tuple[int, ...], expected: tuple[int, ...], does: bool) -> None:
    assert fits(found, expected) == does


MODEL = resolve_model(ModelConfig(vision=VisionConfig(post_norm=False)))


def is_llava(vision: str, model: ModelConfig) -> bool:
    def part(name: str, family: str) -> Any:
        folder = SimpleNamespace(settings=Settings({"hidden_size": 8}, "config.json"))
        return SimpleNamespace(parts=(name,), family=SimpleNamespace(name=family), folder=folder)

    config = composed_config([part("vision", vision), part("language", "llama")], model, image_token=1)
    return config is not None and config["model_type"] == "llava"


def test_clip_or_siglip_with_a_plain_mlp_is_a_llava() -> None:
    assert is_llava("siglip", MODEL)
    assert is_llava("llava", MODEL), "its tower is by default CLIP"
    assert not is_llava("internvl_vision", MODEL)
    assert not is_llava("siglip", replace(MODEL, vision=VisionConfig(post_norm=True)))


@pytest.mark.parametrize(
    "other",
    [{"kind": "linear"}, {"pixel_shuffle": 2}, {"input_norm": True}, {"hidden_size": 8}, {"anyres_max_tiles": 4}],
)
def test_another_projector_is_no_llava(other: dict[str, Any]) -> None:
    assert not is_llava("siglip", replace(MODEL, projector=replace(MODEL.projector, **other)))


NUMBER, INNER, HIDDEN = 6, 3, 5  # twice the inner width is not the width: each orientation shows
EXPERTS = ExpertsConfig(num_experts=NUMBER, ffn_hidden_size=INNER)
FIRST, SECOND = (f"layer.mlp.experts.experts.linear_fc{number}.weight" for number in (1, 2))
OURS = {
    FIRST: torch.arange(NUMBER * 2 * INNER * HIDDEN).view(NUMBER, 2 * INNER, HIDDEN).float(),
    SECOND: -torch.arange(NUMBER * HIDDEN * INNER).view(NUMBER, HIDDEN, INNER).float(),
    "layer.mlp.router.weight": torch.ones(NUMBER, HIDDEN),
}
SPELLINGS = ("apart", "stacked", "transposed")


def in_files(stored: str) -> dict[str, Tensor]:
    """The same weights as files have them, written without the table."""
    first, second = OURS[FIRST], OURS[SECOND]
    router = {"hf.mlp.gate.weight": OURS["layer.mlp.router.weight"]}
    if stored == "apart":
        for number in range(NUMBER):
            name = f"hf.mlp.experts.{number}."
            gate, up = first[number].chunk(2)
            router |= {f"{name}gate_proj.weight": gate, f"{name}up_proj.weight": up}
            router[f"{name}down_proj.weight"] = second[number]
        return router
    turned = (first.mT, second.mT) if stored == "transposed" else (first, second)
    return router | dict(zip(("hf.mlp.experts.gate_up_proj", "hf.mlp.experts.down_proj"), turned, strict=True))


def opened(stored: Any, folder: Path) -> Pretrained:
    save_file({name: tensor.contiguous() for name, tensor in in_files(stored).items()}, folder / "model.safetensors")
    table = experts_table(EXPERTS, "layer.", "hf.", hidden_size=HIDDEN, stored=stored)
    return Pretrained(HfFolder(folder), FAMILIES[0], ModelConfig(), (), 0, table)


@pytest.mark.parametrize("stored", SPELLINGS)
def test_any_part_of_the_experts_is_read_and_no_other_expert(stored, tmp_path, monkeypatch):
    """EP gives a rank some experts, ETP some of the rows of each half of the first matrix, or columns of the second."""
    pretrained, read = opened(stored, tmp_path), list[int]()
    actual = hf_files.read_into
    monkeypatch.setattr(hf_files, "read_into", lambda *given: (read.append(given[1].nbytes), actual(*given)))
    for key, rows, columns in (
        (FIRST, slice(0, 2 * INNER), slice(0, HIDDEN)),
        (FIRST, slice(INNER + 1, 2 * INNER), slice(0, HIDDEN)),
        (SECOND, slice(0, HIDDEN), slice(1, INNER)),
    ):
        read.clear()
        index = (slice(2, 4), rows, columns)
        assert torch.equal(pretrained.read_slice(key, tuple(OURS[key].shape), index), OURS[key][index])
        assert sum(read) <= 2 * OURS[key][0].nbytes


def test_the_orientation_is_told_by_the_shapes() -> None:
    tables: Any = {
        stored: experts_table(EXPERTS, "layer.", "hf.", hidden_size=HIDDEN, stored=stored)  # type: ignore[arg-type]
        for stored in SPELLINGS
    }
    for stored in SPELLINGS:
        shapes = {name: tuple(tensor.shape) for name, tensor in in_files(stored).items()}
        assert max(tables, key=lambda each: matches(tables[each], shapes)) == stored


QWEN: dict[str, Any] = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 16}
GLM: dict[str, Any] = {"num_hidden_layers": 4, "n_routed_experts": 16, "first_k_dense_replace": 2}


def experts_of(text: dict[str, Any], kind: str = "internvl") -> ExpertsConfig:
    settings = Settings({"model_type": kind, "text_config": text}, "config.json")
    return family_of(settings).config(settings).experts


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"num_experts": 16, "router_topk": 8, "ffn_hidden_size": 768, "router_pre_softmax": True}),
        ({"num_local_experts": 8}, {"num_experts": 8}),  # as Transformers 5 writes it
        ({"norm_topk_prob": True}, {"router_pre_softmax": False}),
        ({"decoder_sparse_step": 2}, {"dense_layers": (0, 2, 4)}),
        ({"mlp_only_layers": [0, 5], "decoder_sparse_step": 3}, {"dense_layers": (0, 1, 3, 4, 5)}),
        ({"decoder_sparse_step": 7}, {"num_experts": 0}),
    ],
)
def test_settings_of_qwen3_moe(given: dict[str, Any], expected: dict[str, Any]) -> None:
    experts = experts_of(QWEN | given)
    assert {name: getattr(experts, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"dense_layers": (0, 1), "shared_ffn_hidden_size": 1408, "router_topk_scaling_factor": None}),
        (
            {"routed_scaling_factor": 2.5, "n_shared_experts": 2},
            {"router_topk_scaling_factor": 2.5, "shared_ffn_hidden_size": 2816},
        ),
        ({"n_group": 8, "topk_group": 4}, {"router_num_groups": 8, "router_group_topk": 4}),
    ],
)
def test_settings_of_glm(given: dict[str, Any], expected: dict[str, Any]) -> None:
    experts = experts_of(GLM | given, "glm4v_moe")
    assert {name: getattr(experts, name) for name in expected} == expected
    assert (experts.router_score_function, experts.router_enable_expert_bias) == ("sigmoid", True)


def test_weights_that_are_integers_or_no_numbers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pretrained, "provides", lambda self, key: True)
    pretrained = opened("apart", tmp_path)
    name = "hf.mlp.experts.3.up_proj.weight"
    broken = in_files("apart")[name].clone()
    for value in (float("nan"), float("inf"), -float("inf")):
        broken[2, 4] = value
        save_file(in_files("apart") | {name: broken}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=rf"^{name} of {tmp_path} has values that are NaN or infinite: copy model"):
            pretrained.read_slice(FIRST, tuple(OURS[FIRST].shape), (slice(2, 5), slice(0, 2 * INNER), slice(0, HIDDEN)))
        assert pretrained.folder.read(name, slice(0, 2)).isfinite().all()
    for dtype, word in ((torch.int32, "I32"), (torch.bool, "BOOL")):
        save_file(in_files("apart") | {name: broken.nan_to_num().to(dtype)}, tmp_path / "model.safetensors")
        again = replace(pretrained, folder=HfFolder(tmp_path))
        assert f"{name} is of type {word}, which holds no weights" in "\n".join(again.problems())


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("adapter_config.json", "is an adapter of PEFT: give the model"),
        ("metrics.jsonl", "is a run: go on with it by --load"),
        ("megavlm.json", "is a checkpoint: go on with it by --load"),
        ("snapshots", "give the hub's OWNER/NAME"),
        ("dataset_info.json", "is a data set: give it to --datasets"),
        ("model-q4.gguf", "holds GGUF weights"),
        ("notes.txt", r"holds no \*.safetensors"),
    ],
)
def test_a_folder_that_is_no_model_is_called_what_it_is(tmp_path: Path, file: str, says: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(UserError, match=says):
        HfFolder(tmp_path)


CLASSES = ("PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizer")


def write_tokenizer(folder: Path, kind: str, *, begins: bool) -> PreTrainedTokenizerFast:
    """Write a tokenizer of single bytes under a class's name, which adds a begin token to texts if it `begins`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<pad>", "<image>")])
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    found = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    found.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": kind}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("begins", [False, True])
def test_texts_end_with_the_end_token_and_are_else_the_same(tmp_path: Path, kind: str, begins: bool) -> None:
    before = write_tokenizer(tmp_path, kind, begins=begins)
    trained_with = HuggingFaceTokenizer.of(tmp_path)
    texts = ["a cat", "the <image> on a mat"]
    plain = [before(text).input_ids for text in texts]
    assert end_texts(tmp_path)
    after = AutoTokenizer.from_pretrained(tmp_path)
    assert [after(text).input_ids for text in texts] == [[*ids, before.eos_token_id] for ids in plain]
    again = HuggingFaceTokenizer.of(tmp_path)  # an export can be trained further, with the tokens that it had
    assert (again.begin, again.eos) == (trained_with.begin, trained_with.eos)
    assert again.encode(texts[1]).ids.tolist() == trained_with.encode(texts[1]).ids.tolist()


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_without_a_tokenizer_of_its_own_format_there_is_no_pipeline(tmp_path: Path, missing: str) -> None:
    write_tokenizer(tmp_path, CLASSES[0], begins=False)
    (tmp_path / missing).unlink()
    write_embedding_files(tmp_path, ModelConfig(objective=ObjectiveConfig(kind="contrastive")), {})
    assert not (tmp_path / "modules.json").exists()


def test_the_pipeline_says_what_the_run_did(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, CLASSES[0], begins=False)
    before = (tmp_path / "tokenizer.json").read_bytes()
    write_embedding_files(tmp_path, ModelConfig(objective=ObjectiveConfig(kind="contrastive", pooling="chat")), {})
    assert (tmp_path / "tokenizer.json").read_bytes() == before
    model = json.loads((tmp_path / "sentence_bert_config.json").read_text())
    assert model["processing_kwargs"] == {"chat_template": {"add_generation_prompt": True}}
    assert model["modality_config"]["message"]["format"] == "structured"
    options = ObjectiveConfig(kind="sigmoid", pooling="mean", query_prefix="find: ", document_prefix="see: ")
    write_embedding_files(tmp_path, ModelConfig(objective=options), {"temperature": 0.25, "sigmoid_bias": -8.0})
    assert json.loads((tmp_path / "1_Pooling/config.json").read_text())["pooling_mode"] == "mean"
    settings = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    assert settings["prompts"] == {"query": "find: ", "document": "see: "}
    assert read_embedding_file(tmp_path).objective.query_prefix == "find: "


def test_a_header_is_parsed_once_while_its_file_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[str]()

    def counting(path: str, **kwargs: Any) -> Any:
        opened.append(path)
        return safe_open(path, **kwargs)

    safe_open = hf_files.safe_open
    monkeypatch.setattr(hf_files, "safe_open", counting)
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2, 3)}, file)
    assert [HfFolder(tmp_path).tensors["weight"].shape for _ in range(3)] == [(2, 3)] * 3
    assert opened == [str(file)]
    save_file({"weight": torch.zeros(3, 2)}, file)  # of the same size
    os.utime(file, ns=(0, 1))
    assert HfFolder(tmp_path).tensors["weight"].shape == (3, 2)
    assert opened == [str(file)] * 2
