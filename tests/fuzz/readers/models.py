"""Readers of the files of a Hugging Face folder: configuration, weights, tokenizers, processors and templates."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from megavlm.checkpoint.hf.hf_files import HfFolder
from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained, with_pretrained_model
from megavlm.config.schema import CheckpointConfig, Config, DataConfig, ModelConfig
from megavlm.data.chat import ChatFormat
from megavlm.data.preprocessors import processor_for
from megavlm.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megavlm.data.tokenizers.sentence_piece import SentencePieceTokenizer, train_tokenizer
from megavlm.data.types import Conversation, Turn
from megavlm.families import PUBLISHED, family_of, processor_from
from megavlm.families.shared.settings import Settings
from megavlm.json_files import read_json
from megavlm.rules.defaults import resolve
from tests.fuzz.child import Reader
from tests.support import tokenizers

SAFETENSORS = save({"a": torch.ones(4, 3), "b": torch.ones(2).bfloat16(), "c": torch.tensor(1.0)})
CONFIGS = [json.dumps({"model_type": kind.model_types[0], **values}).encode() for kind, values in PUBLISHED.values()]
CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
    "do_center_crop": True,
    "image_std": [1, 1, 1],
    "resample": 3,
}
_PATCH = ModelConfig().vision.patch_size
PROCESSORS: list[dict[str, Any]] = [
    CLIP,
    {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}},
    {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": _PATCH, "merge_size": 1, "max_pixels": 4096},
    {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "size": {"height": 32, "width": 32},
        "crop_to_patches": True,
        "max_patches": 4,
    },
    {"image_processor_type": "LlavaOnevisionImageProcessor", "image_grid_pinpoints": [[32, 64], [64, 32]]},
    {"image_processor_type": "Idefics3ImageProcessor", "max_image_size": {"longest_edge": 64}},
    {"image_processor_type": "PixtralImageProcessor", "patch_size": _PATCH, "size": {"longest_edge": 64}},
    {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}},
]
PICTURES = ((30, 20), (1, 3000), (333, 64))


def config_json(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    settings = Settings(read_json(folder / "config.json"), "config.json")
    family = family_of(settings)
    model = family.config(settings)
    for prefixes in family.name_prefixes:
        family.table(model, prefixes)
    resolve(replace(Config(), model=model))
    if family.tiling is not None:
        family.tiling(settings)((300, 200))


def whole_folder(folder: Path, data: bytes) -> None:
    """Read a folder as `--init-from` does before the model is made."""
    (folder / "config.json").write_bytes(data)
    (folder / "model.safetensors").write_bytes(SAFETENSORS)
    config = with_pretrained_model(Config(checkpoint=CheckpointConfig(init_from=str(folder))))
    assert config.model.language.hidden_size
    assert len(Pretrained.of(folder, *ALL_PARTS).problems()) < 10**6


def quantized(config: bytes) -> bytes:
    """Return a config.json that says how weights are quantized."""
    weights = {"num_bits": 4, "symmetric": True, "actorder": None, "block_structure": [1, 32]}
    said = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"0": {"weights": weights}},
    }
    return json.dumps({**json.loads(config), "quantization_config": said}).encode()


def image_processor(folder: Path, data: bytes) -> None:
    """Read the options of an image processor and use it on three pictures, as a data worker does."""
    (folder / "preprocessor_config.json").write_bytes(data)
    options, model = read_json(folder / "preprocessor_config.json"), ModelConfig()
    processor = processor_from(options, model)
    if processor.anyres:
        processor = processor_from(options, replace(model, projector=replace(model.projector, anyres_max_tiles=9)))
    for height, width in PICTURES:
        layout = processor.layout(height, width)
        assert layout.features < 10**7
        if layout.patches < 20_000:
            processor.tiles(np.zeros((height, width, 3), np.uint8))


def processor_folder(folder: Path, data: bytes) -> None:
    (folder / "processor_config.json").write_bytes(data)
    processor_for(Config(data=DataConfig(image_processor=str(folder)))).layout(30, 20)


def weights(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    found = HfFolder(folder)
    for name in found.tensors:
        found.read(name, slice(0, 1))
        found.same(name, name)


def index(folder: Path, data: bytes) -> None:
    (folder / "model-1.safetensors").write_bytes(SAFETENSORS)
    (folder / "model.safetensors.index.json").write_bytes(data)
    assert HfFolder(folder).tensors is not None


@cache
def tokenizer_files() -> dict[str, bytes]:
    import transformers

    with tempfile.TemporaryDirectory() as name:
        made = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.llama(), eos_token="</s>", bos_token="<s>", pad_token="<unk>"
        )
        made.chat_template = tokenizers.TEMPLATES["llava"]
        made.save_pretrained(name)
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}


def tokenizer(folder: Path, data: bytes, *, name: str) -> None:
    """Read a tokenizer of which one file is `data`; tokenize and template a conversation."""
    for each, content in {**tokenizer_files(), name: data}.items():
        (folder / each).write_bytes(content)
    found = HuggingFaceTokenizer.of(folder)
    found.encode("What is in the picture?")
    ChatFormat.of(found).encode(Conversation((Turn("user", ("Hi",)), Turn("assistant", ("Hello",)))), [])


@cache
def sentence_pieces() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tokenizer.model"
        train_tokenizer(tokenizers.TEXTS * 5, path, vocab_size=120)
        return path.read_bytes()


def sentence_piece(folder: Path, data: bytes) -> None:
    (folder / "tokenizer.model").write_bytes(data)
    found = SentencePieceTokenizer(folder / "tokenizer.model")
    tokens = found.encode("What is in the picture? <image></s>")
    found.decode(tokens.ids.tolist())


def template(folder: Path, data: bytes) -> None:
    """Read a chat template out of `chat_template.jinja`, try it out and render a conversation."""
    for each, content in {**tokenizer_files(), "chat_template.jinja": data}.items():
        (folder / each).write_bytes(content)
    chat = ChatFormat.of(HuggingFaceTokenizer.of(folder))
    turns = (Turn("system", ("Be kind.",)), Turn("user", ("Hi",)), Turn("assistant", ("Hello",)))
    chat.encode(Conversation(turns), [])


def of_tokenizer(name: str) -> Reader:
    return Reader(partial(tokenizer, name=name), lambda: [tokenizer_files().get(name, b"{}")], memory=2**31, few=2)


def jsons(values: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


INDEX = b'{"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}'
READERS = {
    "config.json": Reader(config_json, lambda: CONFIGS),
    "hugging face folder": Reader(whole_folder, lambda: [*CONFIGS, *map(quantized, CONFIGS[:2])], few=5),
    "preprocessor_config.json": Reader(image_processor, lambda: jsons(PROCESSORS), memory=2**31, few=40),
    "processor_config.json": Reader(
        processor_folder, lambda: jsons([{"image_processor": each} for each in PROCESSORS])
    ),
    "safetensors": Reader(weights, lambda: [SAFETENSORS, save({"a": torch.zeros(0, 3), "b": torch.zeros(2, 0)})]),
    "index": Reader(index, lambda: [INDEX]),
    "tokenizer.json": of_tokenizer("tokenizer.json"),
    "tokenizer_config.json": of_tokenizer("tokenizer_config.json"),
    "special_tokens_map.json": of_tokenizer("special_tokens_map.json"),
    "added_tokens.json": of_tokenizer("added_tokens.json"),
    "chat_template.json": of_tokenizer("chat_template.json"),
    "sentencepiece": Reader(sentence_piece, lambda: [sentence_pieces()]),
    "chat template": Reader(
        template, lambda: [each.encode() for each in tokenizers.TEMPLATES.values()], few=6, memory=2**31
    ),
}
