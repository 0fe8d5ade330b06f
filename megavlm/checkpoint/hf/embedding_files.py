"""Write and read the extra files of an exported embedding model, and of an export in parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

from megavlm.config.registry import registered
from megavlm.config.schema import CheckpointConfig, Config, ModelConfig, ObjectiveConfig
from megavlm.errors import UserError
from megavlm.families.shared.family import ALL_PARTS
from megavlm.files import replace_file
from megavlm.json_files import check, read_json, whole

_TOKENIZER = "tokenizer.json"
_TEMPLATE = "TemplateProcessing"
_POOLING = {"last": "lasttoken", "mean": "mean", "chat": "lasttoken"}  # the names of Sentence Transformers
# Files of a Sentence Transformers pipeline that are the same for all models, by name.
_PIPELINE = Path(__file__).with_name("sentence_transformers.json")
FILE = "megavlm_embedding.json"
_OPTIONS = ("pooling", "query_prefix", "document_prefix", "matryoshka_widths")
PARTS_FILE = "megavlm_parts.json"


def write_embedding_files(folder: Path, model: ModelConfig, scores: Mapping[str, float]) -> None:
    """Write the files that describe how an exported model computes embeddings.

    `scores` has the scalars that turn cosines into the scores of the loss. Unless texts are turns of a chat,
    `tokenizer.json` is changed so that it appends the end token, whose hidden state may be the embedding, to each text.
    If it cannot be changed, the files for Sentence Transformers are left out.
    """
    write_embedding_file(folder, model.objective, scores)
    if model.objective.pooling == "chat" or end_texts(folder):
        write_sentence_transformers_files(folder, model.objective, width=model.language.hidden_size)


def write_file_of_parts(folder: Path, model: ModelConfig) -> None:
    """Write `megavlm_parts.json`: settings of a model exported in parts that no part's config.json has."""
    beside = {"vision_feature_layer": model.vision.feature_layer, "image_token": model.image_token}
    replace_file(folder / PARTS_FILE, json.dumps(beside, indent=2) + "\n")


def write_embedding_file(folder: Path, options: ObjectiveConfig, scores: Mapping[str, float]) -> None:
    """Write `megavlm_embedding.json`: objective, pooling, prefixes and loss scalars of an exported embedding model."""
    named = {name: getattr(options, name) for name in _OPTIONS}
    content = {"objective": options.kind, "normalized": True, **named, **scores}
    replace_file(folder / FILE, json.dumps(content, indent=2) + "\n")


def is_in_parts(folder: Path) -> bool:
    """Return whether a folder is an export in parts: each part has a folder with a config.json in it."""
    return not (folder / "config.json").exists() and all(
        (folder / part / "config.json").is_file() for part in ALL_PARTS
    )


def begun_with(folder: Path, said: ModelConfig) -> Config:
    """Return the configuration of a run that begins with a Hugging Face folder or an export in parts; `said` are model
    options that no config.json has. Raises UserError for invalid values in `megavlm_parts.json`.
    """
    if not is_in_parts(folder):
        return Config(model=said, checkpoint=CheckpointConfig(init_from=str(folder)))
    beside = read_json(folder / PARTS_FILE)
    kinds = {"vision_feature_layer": whole(-(2**20), 2**20), "image_token": whole(0, 2**31)}
    check(beside, kinds, str(folder / PARTS_FILE))
    layer = beside.get("vision_feature_layer")
    vision = said.vision if layer is None else replace(said.vision, feature_layer=layer)
    model = replace(said, vision=vision, image_token=beside.get("image_token"))
    vision_from, projector_from, language_from = (str(folder / part) for part in ALL_PARTS)
    parts = CheckpointConfig(vision_from=vision_from, projector_from=projector_from, language_from=language_from)
    return Config(model=model, checkpoint=parts)


def check_predicts(folder: Path) -> None:
    """Raise UserError for an exported embedding model, whose output layer was not trained."""
    if (folder / FILE).is_file():
        raise UserError(f"{folder} was trained to embed, and predicts no token: megavlm embed writes its vectors")


def read_embedding_file(folder: Path) -> ModelConfig:
    """Return a model configuration with the objective of `megavlm_embedding.json`, and defaults otherwise.

    Raises UserError if the folder lacks this file, or if the file has invalid values.
    """
    if not (folder / FILE).is_file():
        raise UserError(f"{folder} has no {FILE}: train a model that embeds, with --objective contrastive or sigmoid")
    found = read_json(folder / FILE)
    kinds = (*get_args(get_type_hints(ObjectiveConfig)["kind"]), *registered("objectives"))
    if found.get("objective") not in kinds or found.get("pooling") not in _POOLING:
        raise UserError(f"{folder / FILE} names no objective or pooling that megavlm knows")
    values: dict[str, Any] = {name: found.get(name, getattr(ObjectiveConfig(), name)) for name in _OPTIONS}
    if not all(isinstance(values[name], str) for name in _OPTIONS[:3]):
        raise UserError(f"{folder / FILE} has an instruction that is no text")
    values["matryoshka_widths"] = tuple(width for width in values["matryoshka_widths"] if isinstance(width, int))
    return ModelConfig(objective=replace(ObjectiveConfig(kind=cast(Any, found["objective"])), **values))


def write_sentence_transformers_files(folder: Path, options: ObjectiveConfig, *, width: int) -> None:
    """Write a Sentence Transformers pipeline of model, pooling and normalisation, with the prefixes as its prompts."""
    pipeline = read_json(_PIPELINE)
    if options.pooling == "chat":  # texts and images become a user's turn, and a prompt the system's
        model = pipeline["sentence_bert_config.json"]
        kinds = model["modality_config"]
        kinds["message"] = {**kinds["text"], "format": "structured"}
        model["processing_kwargs"] = {"chat_template": {"add_generation_prompt": True}}
    files: dict[str, Any] = {
        **pipeline,
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": {"query": options.query_prefix, "document": options.document_prefix},
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {"embedding_dimension": width, "pooling_mode": _POOLING[options.pooling]},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        replace_file(folder / name, json.dumps(content, indent=2) + "\n")


def end_texts(folder: Path) -> bool:
    """Change a folder's `tokenizer.json` so that it appends the end token to each text.

    Return False, without a change, if there is no `tokenizer.json`, if it lacks the end token, or if its
    post-processor is of a kind that cannot be extended.
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
    """Return a post-processor that applies `before` and appends the end token to each text; None if `before` is of a
    kind that cannot be extended.

    A second template would treat the tokens of a first one as part of the text, so an existing template is extended.
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
