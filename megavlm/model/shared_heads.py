"""Attention where tensor-parallel ranks share key/value heads, or have query heads of zeros (`config/tensor_split.py`).

Legend: S positions, B rows, L slots of a rank with R query heads each, C slots of a key/value head, D head width, w =
⌈D/C⌉ channels of a key, and of a value, that a slot projects.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from megavlm.config.tensor_split import HeadSplit
from megavlm.model.rotary import Heads


class SharedHeads:
    """Splits what a rank has projected into heads, and gathers the parts of its keys and values from their ranks.

    The backward pass sends gradients back and adds them up where a part came from, as autograd derives it.
    """

    def __init__(self, split: HeadSplit, group: dist.ProcessGroup) -> None:
        self.split, self.group = split, group
        self.exchange = split.exchange(group.rank())

    def __call__(self, mixed: Tensor) -> Heads:
        """[S, B, L·(R·D + 2·w)] → query [S, B, L·R, D], key and value [S, B, L, D]."""
        split = self.split
        query, parts = mixed.unflatten(-1, (split.slots, -1)).split(
            [split.queries * split.width, 2 * split.part_width], dim=-1
        )
        key, value = (self._joined(x) for x in self._gathered(parts).unflatten(-1, (2, -1)).unbind(-2))
        return query.reshape(*query.shape[:2], split.local_heads, split.width), key, value

    def _gathered(self, parts: Tensor) -> Tensor:
        """[S, B, L, 2·w] → the parts of the whole keys and values [L, C, S, B, 2·w]."""
        sends, receives = self.exchange.sends, list(self.exchange.receives)
        wanted = [parts[:, :, number] for numbers in sends for number in numbers]
        # A rank of padding alone sends nothing, but still takes part in the exchange of the backward pass.
        sent = torch.stack(wanted) if wanted else parts[:, :, :0].movedim(2, 0)
        arrived = all_to_all(self.group, sent, receives, [len(numbers) for numbers in sends])
        return torch.stack([torch.stack([arrived[at] for at in places]) for places in self.exchange.places])

    def _joined(self, parts: Tensor) -> Tensor:
        """[L, C, S, B, w] → [S, B, L, D]."""
        return parts.permute(2, 3, 0, 1, 4).flatten(-2)[..., : self.split.width]


@cache
def without_padding(attention: type) -> type:
    """Return a class like `attention`, a core attention, whose output is zero for query heads that are padding.

    Such a head has zeros for a query and real keys, so that attention gives it the mean of the values. The output
    layer has zeros for it; but without this their gradient would not be zero.
    """

    class AttentionWithoutPadding(attention):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, split: HeadSplit, rank: int, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            padded = torch.zeros(split.local_heads, split.width, dtype=torch.bool)
            padded[list(split.padded_heads(rank))] = True
            self.register_buffer("padded", padded.flatten(), persistent=False)

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            found: Tensor = super().forward(*args, **kwargs).masked_fill(self.padded, 0.0)
            return found

    return AttentionWithoutPadding
