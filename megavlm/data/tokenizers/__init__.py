"""Define what all tokenizers of the data offer: text to tokens and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MOST_GROWTH = 16  # texts may be so many times as long before they are split; "▁" for a space leaves them as long


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

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Text of tokens, special ones included unless `special` is False."""
        ...


def tokens_of(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Tokens:
    bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return Tokens(np.array(ids, dtype=np.int64), bounds[:, 0], bounds[:, 1])


def growth_of_charsmap(charsmap: bytes) -> float:
    """Return about how many times as long a text becomes by SentencePiece's table of characters: a trie after its size,
    then the texts that it points to, each ended by a zero. A character has four bytes at most.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(map(len, texts.split(b"\0"))) / 4
