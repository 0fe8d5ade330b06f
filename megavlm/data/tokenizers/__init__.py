"""Define the interface of text tokenizers, which convert text to tokens and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

NO_IMAGE = -1  # the image token of a language model alone: no text has it
MOST_GROWTH = 16  # factor by which normalization may lengthen a text; "▁" for a space does not lengthen it


@dataclass(frozen=True, eq=False)
class Tokens:
    """L tokens of a text, and the character range [start, end) of each token."""

    ids: NDArray[np.int64]  # [L]
    starts: NDArray[np.int64]  # [L]
    ends: NDArray[np.int64]  # [L]

    def __len__(self) -> int:
        return len(self.ids)


class TextTokenizer(Protocol):
    """Interface of a tokenizer for chat formats and loaders. A tokenizer can be pickled and used from threads."""

    vocab_size: int  # the largest token id + 1
    pad: int
    eos: int
    begin: int | None  # the token that the tokenizer puts at the beginning of a sequence, if any
    image: int
    image_text: str  # the text of the token `image`
    specials: Mapping[str, str]  # texts of bos_token, eos_token, …, as variables for chat templates
    chat_template: str | None  # the tokenizer's own chat template

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text, with nothing added. Special tokens spelt out in the text become tokens."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of tokens, special tokens included unless `special` is False."""
        ...


def tokens_of(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Tokens:
    bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return Tokens(np.array(ids, dtype=np.int64), bounds[:, 0], bounds[:, 1])


def growth_of_charsmap(charsmap: bytes) -> float:
    """Return an estimate of the factor by which SentencePiece's character map can lengthen a text.

    The map is the size of a trie, the trie, and the replacement texts, each ended by a zero byte. A character has at
    most four bytes.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(map(len, texts.split(b"\0"))) / 4
