"""Hold a tokenized conversation as turns, between which it may be split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class EncodedTurn:
    """L tokens that stay in one sequence unless `divisible`: a question with its answer, or a piece of plain text."""

    tokens: NDArray[np.int64]  # [L], each image expanded to one image token per feature
    trained: NDArray[np.bool_]  # [L]; the tokens that the model must learn to predict
    images: int  # number of images in these tokens
    divisible: bool = False  # plain text, which may be split between any two tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, end: int) -> EncodedTurn:
        """Return tokens `start` to `end` of divisible text."""
        assert self.divisible, "only plain text is split inside a turn"
        return EncodedTurn(self.tokens[start:end], self.trained[start:end], 0, divisible=True)


@dataclass(frozen=True, eq=False)
class EncodedConversation:
    """A conversation. Each piece of it begins with `opening` (begin-of-text token, system turn); `turns` follow."""

    opening: EncodedTurn
    turns: tuple[EncodedTurn, ...]

    @property
    def tokens(self) -> NDArray[np.int64]:
        return np.concatenate([turn.tokens for turn in self._all])

    @property
    def trained(self) -> NDArray[np.bool_]:
        return np.concatenate([turn.trained for turn in self._all])

    @property
    def images(self) -> int:
        return sum(turn.images for turn in self._all)

    def __len__(self) -> int:
        return sum(map(len, self._all))

    @property
    def _all(self) -> Iterable[EncodedTurn]:
        return (self.opening, *self.turns)
