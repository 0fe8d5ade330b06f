"""Find the largest attention logit of each head of the model in a step, on whichever ranks it was computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.config.schema import Config
from megavlm.config.tensor_split import HeadSplit
from megavlm.model.largest_logits import LogitAttention
from megavlm.model.vlm import VLMChunk, bare_chunk
from megavlm.optim.qk_clip import clipped_layers


@dataclass(frozen=True)
class _Seen:
    """The heads of a layer that this rank attends with: numbers `local` in its attention are `places` in the model."""

    attention: LogitAttention
    local: Tensor
    places: Tensor


class HeadLogits:
    """The largest logits of all heads, layer by layer, of the training passes since `clear`."""

    def __init__(self, chunks: Sequence[Any], config: Config, device: torch.device) -> None:
        """`chunks` are all chunks that this rank holds, a colocated encoder's too."""
        layers = clipped_layers(config)
        first = dict(zip(layers, accumulate((split.heads for split in layers.values()), initial=0), strict=False))
        self._count = sum(split.heads for split in layers.values())
        self._device = device
        self._seen = [each for chunk in chunks for each in _seen_in(bare_chunk(chunk), config, first, device)]

    def clear(self) -> None:
        """Forget the logits of earlier passes."""
        for each in self._seen:
            each.attention.largest.zero_()

    def over_ranks(self) -> Tensor:
        """Return the largest logit of each head over all ranks [heads of all layers] float64; all ranks call it.

        A head without a positive logit has 0.
        """
        found = torch.zeros(self._count, dtype=torch.float64, device=self._device)
        for each in self._seen:
            found[each.places] = each.attention.largest[each.local]
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found


def _seen_in(chunk: VLMChunk, config: Config, first: Mapping[str, int], device: torch.device) -> list[_Seen]:
    found, splits = [], clipped_layers(config, tp=chunk.groups.dims.tp)
    for name, layer in chunk.transformer_layers:
        attention: Any = layer.self_attention.core_attention
        if name in first:
            assert isinstance(attention, LogitAttention), name
            heads = _model_heads(attention, splits[name], chunk.groups.tp.rank())
            pairs = [(local, first[name] + head) for local, head in enumerate(heads) if head is not None]
            local, places = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(device).unbind(-1)
            found.append(_Seen(attention, local, places))
    return found


def _model_heads(attention: Any, split: HeadSplit, rank: int) -> list[int | None]:
    """Return which query head of the model each head of an attention is; None where it is padding.

    Of a tensor-parallel rank's heads, each of the context-parallel ranks that exchange heads has equally many, in
    order.
    """
    every = [
        slot.first + query if query < slot.count else None
        for slot in split.slots_of(rank)
        for query in range(split.queries)
    ]
    count = len(attention.largest)
    context = getattr(attention, "context", None)
    place = 0 if context is None else context.heads.rank() * count
    return every[place : place + count]
