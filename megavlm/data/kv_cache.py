"""Keys and values of tokens that the model has read, so that a token of an answer costs one position, not the text.

Legend: B rows, S positions of this pass, L positions that the cache has room for, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


class KeyValueCache:
    """What this rank's language layers keep of B rows: keys and values, [B, L, G, D] for each layer."""

    def __init__(self, length: int) -> None:
        """Give every row room for `length` positions; memory is taken when a layer first adds something."""
        self.length = length
        self._kept: dict[object, tuple[Tensor, Tensor]] = {}

    def add(self, layer: object, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep keys and values [B, S, G, D] of a layer at `places` [B, S] of each row; return all, [B, L, G, D]."""
        if layer not in self._kept:
            shape = (key.shape[0], self.length, *key.shape[2:])
            self._kept[layer] = key.new_zeros(shape), value.new_zeros(shape)
        rows = torch.arange(key.shape[0], device=key.device)[:, None]
        for kept, new in zip(self._kept[layer], (key, value), strict=True):
            kept[rows, places] = new
        return self._kept[layer]


@dataclass(frozen=True, eq=False)
class Continuation:
    """How the rows of a pass go on from those before: S positions of row b follow its first `starts[b]` ones.

    Behind a row's last real position of the pass, at `last[b]` < S, comes padding, which the next pass overwrites.
    """

    cache: KeyValueCache
    starts: Tensor  # [B] int64, on the device
    last: Tensor  # [B] int64, on the device

    def advanced(self) -> Continuation:
        """Return the continuation for one more token of each row."""
        return replace(self, starts=self.starts + self.last + 1, last=torch.zeros_like(self.last))
