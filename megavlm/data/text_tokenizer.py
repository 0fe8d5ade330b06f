"""Text ↔ tokens of the user's data, whatever wrote the tokenizer: Hugging Face or SentencePiece."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from megavlm.config.schema import Config
from megavlm.data.tokenizer import IMAGE
from megavlm.errors import UserError


@dataclass(frozen=True, eq=False)
class Tokens:
    """L tokens of a text, and the characters [start, end) that each of them stands for."""

    ids: NDArray[np.int64]  # [L]
    starts: NDArray[np.int64]  # [L]
    ends: NDArray[np.int64]  # [L]

    def __len__(self) -> int:
        return len(self.ids)


class TextTokenizer(Protocol):
    """What chat formats and loaders need of a tokenizer. It is pickled, and safe in threads."""

    vocab_size: int  # every token is below
    pad: int
    eos: int
    begin: int | None  # the token that each sequence begins with, where the tokenizer puts one there
    image: int
    image_text: str  # what is written where `image` belongs
    specials: Mapping[str, str]  # bos_token, eos_token, …: what chat templates may write
    chat_template: str | None  # the tokenizer's own

    def encode(self, text: str) -> Tokens:
        """Tokens of a text. Nothing is added around it; special tokens that are spelt out in it are tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        ...


class SentencePieceTokenizer:
    """A SentencePiece model. The model itself reads control pieces (`</s>`) as text: here they are tokens.

    As in Llama's first tokenizers, each stretch of text between control pieces begins with the model's own space.
    """

    chat_template: str | None = None

    def __init__(self, path: Path, *, image: int | None = None, image_text: str = IMAGE) -> None:
        """Raises UserError where `path` is no model, or has neither end mark nor image token."""
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError, TypeError) as error:
            raise UserError(
                f"--tokenizer {path} is not a readable SentencePiece model: give a .model file, or the folder of "
                "a Hugging Face tokenizer"
            ) from error
        model = self._model
        self.vocab_size: int = model.get_piece_size()
        self.eos: int = model.eos_id()
        self.begin: int | None = model.bos_id() if model.bos_id() >= 0 else None
        if self.eos < 0:
            raise UserError(f"--tokenizer {path} has no end mark: train it with eos_id")
        self.pad: int = model.pad_id() if model.pad_id() >= 0 else self.eos
        self.image, self.image_text = self._image(path, image, image_text)
        named = {"bos_token": self.begin, "eos_token": self.eos, "pad_token": model.pad_id()}
        self.specials: Mapping[str, str] = {
            name: model.id_to_piece(number) for name, number in named.items() if number is not None and number >= 0
        }
        control = {model.id_to_piece(number): number for number in range(self.vocab_size) if model.is_control(number)}
        self._control = {**control, self.image_text: self.image}
        self._pattern = _any_of(self._control)

    def _image(self, path: Path, image: int | None, text: str) -> tuple[int, str]:
        model = self._model
        if image is not None and image < self.vocab_size:
            return image, model.id_to_piece(image)
        found = model.piece_to_id(text)
        if found == model.unk_id():
            raise UserError(
                f"--tokenizer {path} has no {text}: train it with user_defined_symbols, or name an unused piece "
                "with --image-token"
            )
        return found, text

    def encode(self, text: str) -> Tokens:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        at = 0
        for stretch in self._pattern.split(text):
            if stretch in self._control:
                ids.append(self._control[stretch])
                spans.append((at, at + len(stretch)))
            elif stretch:
                found = self._model.encode(stretch, out_type="offset_mapping")
                ids.extend(found["ids"])
                spans.extend((at + start, at + end) for start, end in found["offsets"])
            at += len(stretch)
        return tokens_of(ids, spans)

    def decode(self, ids: Sequence[int]) -> str:
        names = {number: text for text, number in self._control.items()}
        parts: list[str | list[int]] = []
        for token in map(int, ids):
            if token in names:
                parts.append(names[token])
            elif parts and isinstance(parts[-1], list):
                parts[-1].append(token)
            else:
                parts.append([token])
        return "".join(part if isinstance(part, str) else self._model.decode(part) for part in parts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": self._model.serialized_model_proto()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._model = sentencepiece.SentencePieceProcessor(model_proto=state["_model"])


def tokens_of(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Tokens:
    bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return Tokens(np.array(ids, dtype=np.int64), bounds[:, 0], bounds[:, 1])


def _any_of(words: Mapping[str, int]) -> re.Pattern[str]:
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def tokenizer_for(config: Config, *, image_text: str = IMAGE) -> TextTokenizer:
    """The tokenizer of a run: `--tokenizer`, else that of the folder that the language model comes from.

    `image_text` is what the image processor calls the image token; `--image-token`, or the model's own, goes before.
    Raises UserError where there is none, or where the model has no place for its tokens.
    """
    path = tokenizer_path(config)
    image = config.model.image_token
    if path.is_dir():
        from megavlm.data.hf_tokenizer import HuggingFaceTokenizer

        tokenizer: TextTokenizer = HuggingFaceTokenizer.of(path, image=image, image_text=image_text)
    elif path.is_file():
        tokenizer = SentencePieceTokenizer(path, image=image, image_text=image_text)
    else:
        raise UserError(f"--tokenizer {path} is not there: give a Hugging Face folder or a SentencePiece model")
    vocabulary = config.model.language.vocab_size
    if image is not None and image != tokenizer.image:
        raise UserError(f"--image-token {image} is not in {path}, where it is {tokenizer.image}: leave it out")
    if vocabulary is not None and vocabulary < tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer {path} has {tokenizer.vocab_size} tokens, and the model {vocabulary}: give the model's own "
            "to --tokenizer"
        )
    return tokenizer


def tokenizer_path(config: Config) -> Path:
    """Where the tokenizer is. Raises UserError where no option says so."""
    given = config.data.tokenizer or config.checkpoint.init_from or config.checkpoint.language_from
    if given is None:
        raise UserError(
            "--sources need a tokenizer: give --tokenizer a Hugging Face folder or a SentencePiece model, or a "
            "model to --init-from"
        )
    return Path(given)


def model_type(path: Path) -> str | None:
    """The architecture that a tokenizer's folder belongs to, where config.json says so."""
    try:
        found = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None
