"""The files by which sentence-transformers (Reimers and Gurevych 2019) loads an export of a model that embeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megavlm.config.schema import ObjectiveConfig
from megavlm.files import replace_file
from megavlm.json_files import read_json

_TOKENIZER = "tokenizer.json"
_TEMPLATE = "TemplateProcessing"
_POOLING = {"last": "lasttoken", "mean": "mean"}  # their names
_MODULES = (
    ("", "sentence_transformers.base.modules.transformer.Transformer"),
    ("1_Pooling", "sentence_transformers.sentence_transformer.modules.pooling.Pooling"),
    ("2_Normalize", "sentence_transformers.base.modules.normalize.Normalize"),
)


def write_sentence_transformers_files(folder: Path, options: ObjectiveConfig, *, width: int) -> None:
    """Write a pipeline of model, pooling and normalisation, with the instructions as its prompts."""
    states = {"method": "forward", "method_output_name": "last_hidden_state"}
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": kind}
            for number, (path, kind) in enumerate(_MODULES)
        ],
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": states, "image+text": states},
            "module_output_name": "token_embeddings",
            "unpad_inputs": False,
        },
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": {"query": options.query_prefix, "document": options.document_prefix},
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {"embedding_dimension": width, "pooling_mode": _POOLING[options.pooling]},
        "2_Normalize/config.json": {},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        replace_file(folder / name, json.dumps(content, indent=2) + "\n")


def end_texts(folder: Path) -> bool:
    """Let the tokenizer of a folder add its end token to each text; return False if it has no `tokenizer.json`, or
    none that names the token.
    """
    file = folder / _TOKENIZER
    tokenizer = read_json(file) if file.is_file() else {}
    end = _end_token(folder) or ""
    numbers = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    if end not in numbers:
        return False
    ending = _ending(tokenizer.get("post_processor"), end, numbers[end])
    if ending is None:
        return False
    tokenizer["post_processor"] = ending
    replace_file(file, json.dumps(tokenizer, ensure_ascii=False, indent=2) + "\n")
    return True


def _ending(before: dict[str, Any] | None, end: str, number: int) -> dict[str, Any] | None:
    """Return a post-processor that does what the one before does and has the end token behind each text; None if that
    one is of a kind that no token can be added to.

    A second template would see the tokens of a first one as a text of their own, so a template that is there is
    extended.
    """
    first = [before] if before is not None else []
    parts = before["processors"] if before is not None and before["type"] == "Sequence" else first
    templates = [part for part in parts if part["type"] == _TEMPLATE]
    others = [part for part in parts if part["type"] == "ByteLevel"]
    if len(templates) > 1 or len(templates) + len(others) < len(parts):
        return None
    one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    none: dict[str, Any] = {"single": [one], "pair": [one, two], "special_tokens": {}}
    template = templates[0] if templates else none
    behind = {"SpecialToken": {"id": end, "type_id": 0}}
    if template["single"][-1] != behind:
        known = {**template["special_tokens"], end: {"id": end, "ids": [number], "tokens": [end]}}
        ended = {name: [*template[name], behind] for name in ("single", "pair")}
        template = {"type": _TEMPLATE, **ended, "special_tokens": known}
    return {"type": "Sequence", "processors": [*others, template]}


def _end_token(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        named = read_json(folder / name).get("eos_token") if (folder / name).is_file() else None
        if named is not None:
            return str(named["content"] if isinstance(named, dict) else named)
    return None
