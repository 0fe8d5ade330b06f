"""A conversation in tokens, by the places where it may be cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class EncodedTurn:
    """L tokens that stay together unless `divisible`: an exchange up to the end of its answer, or a stretch of text."""

    tokens: NDArray[np.int64]  # [L], each image expanded to one image token per feature
    trained: NDArray[np.bool_]  # [L]; the tokens that the model must learn to predict
    images: int  # how many images lie in it
    divisible: bool = False  # text that may be cut anywhere

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, end: int) -> EncodedTurn:
        assert self.divisible, "only text is cut"
        return EncodedTurn(self.tokens[start:end], self.trained[start:end], 0, divisible=True)


@dataclass(frozen=True, eq=False)
class EncodedConversation:
    """`opening` is what every piece of the conversation begins with (begin mark, system turn); `turns` follow it."""

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
