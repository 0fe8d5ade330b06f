"""Tokenize with SentencePiece, and train a SentencePiece model on the texts of a run."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from megavlm.data.tokenizers import MOST_GROWTH, NO_IMAGE, Tokens, growth_of_charsmap, tokens_of
from megavlm.errors import UserError
from megavlm.files import replace_file
from megavlm.json_files import LARGEST
from megavlm.paths import read_bytes

IMAGE = "<image>"


def train_tokenizer(texts: Iterable[str], path: Path, *, vocab_size: int) -> None:
    """Train a BPE model on `texts` and write it to `path` atomically.

    Training is deterministic: one thread, all texts in the given order. `vocab_size` is an upper limit; words that are
    frequent in the texts become single pieces. `<image>` is always a piece of its own.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        pad_piece="<pad>",
        user_defined_symbols=[IMAGE],
        num_threads=1,
        minloglevel=2,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, model.getvalue())


# Read without sentencepiece's protobuf module: Transformers has one of the same name, and a process can load only one.
_NORMALIZERS, _CHARSMAP = (3, 5), 2  # fields of ModelProto (normalizer, denormalizer) and of NormalizerSpec


class SentencePieceTokenizer:
    """A SentencePiece model as a `TextTokenizer`. Control pieces in a text (`</s>`) become tokens, unlike in the model.

    As in Llama's first tokenizers, the model adds its space at the beginning of each text between control pieces.
    """

    chat_template: str | None = None

    def __init__(self, path: Path, *, image: int | None = None, image_text: str = IMAGE) -> None:
        """Load a model. Raises UserError if `path` is not a model, or if it lacks an end token or an image token."""
        try:
            proto = read_bytes(path, at_most=LARGEST)
            self._model = sentencepiece.SentencePieceProcessor(model_proto=proto)
            times = max(map(_growth, (b"".join(_fields(proto, number)) for number in _NORMALIZERS)))
        except (OSError, RuntimeError, TypeError, ValueError, LookupError) as error:
            raise UserError(
                f"--tokenizer {path} is not a readable SentencePiece model: give a .model file, or the folder of "
                "a Hugging Face tokenizer"
            ) from error
        if times > MOST_GROWTH:
            raise UserError(f"--tokenizer {path}: its normalizer makes texts {times:.0f} times as long: name another")
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
        if image == NO_IMAGE:
            return image, text
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

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        names = {number: text for text, number in self._control.items()}
        parts: list[str | list[int]] = []
        for token in map(int, ids):
            if token in names:
                parts += [names[token]] if special else []
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


def _growth(normalizer: bytes) -> float:
    return max([0.0, *map(growth_of_charsmap, _fields(normalizer, _CHARSMAP))])


def _fields(proto: bytes, wanted: int) -> list[bytes]:
    """Return the values of the bytes field `wanted` in a Protocol Buffers message that is known to be valid."""
    found, at = [], 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            value |= (proto[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if proto[at - 1] < 128:
                return value

    while at < len(proto):
        key = number()
        if key & 7 == 0:
            number()
            continue
        size = {1: 8, 2: 0, 5: 4}[key & 7] or number()
        if key == wanted << 3 | 2:
            found.append(proto[at : at + size])
        at += size
    return found


def _any_of(words: Mapping[str, int]) -> re.Pattern[str]:
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def ensure_tokenizer(
    texts: Iterable[str], path: Path, *, vocab_size: int, rank: int, barrier: Callable[[], None]
) -> SentencePieceTokenizer:
    """Return the tokenizer at `path`; if it is missing, rank 0 trains it while the other ranks wait in `barrier`.

    Every rank calls `barrier` once, whether or not it found the file, so ranks may differ in that. Raises UserError if
    the file cannot be used.
    """
    if rank == 0 and not path.exists():
        train_tokenizer(texts, path, vocab_size=vocab_size)
    barrier()
    try:
        return SentencePieceTokenizer(path)
    except UserError as error:
        raise UserError(
            f"{path} is not a readable tokenizer: delete it so that the next run trains it again, or choose another "
            "--run-dir"
        ) from error
