"""Exports of models that embed: tokenizers that add their end token, and the files of sentence-transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megavlm.checkpoint.hf import hf_files
from megavlm.checkpoint.hf.embedding_files import end_texts, read_embedding_file, write_embedding_files
from megavlm.checkpoint.hf.hf_files import HfFolder
from megavlm.config.schema import ModelConfig, ObjectiveConfig
from megavlm.data.tokenizers.hugging_face import HuggingFaceTokenizer

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
