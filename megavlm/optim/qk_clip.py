"""QK-Clip: scale the projections of attention heads whose logits grew too large (Kimi K2, arXiv 2507.20534, MuonClip).

With m_h the largest logit of query head h over all tokens of a step, and τ the threshold, the head's logits have to
shrink by γ_h = min(1, τ / m_h). A logit is bilinear in query and key, and rotation keeps it so: any factors θ_h of the
head's query projection and κ_g of its key projection with θ_h · κ_g = γ_h do. Heads of one group share the key, so

    κ_g = (max γ_h over the group's heads)^(1 − α)        θ_h = γ_h / κ_g

With heads of their own keys that is θ = γ^α, κ = γ^(1−α), as in the paper (α = ½). In a group, κ_g = 1 as soon as one
of its heads needs no clipping, so that no head is scaled by more than its own logits ask for: the paper treats the key
part that its heads share in the same way. (megatron-core 0.16.1 scales all heads of a group by its smallest γ.)

Latent attention shares the rotated part of keys among all heads: there a head's queries take γ in the channels that
rotate and γ^½ in the others, as its keys do.

Weights and biases are scaled after the optimizer's update and before the model gets the new weights; moments stay as
they are. Each rank scales the elements that it updates, wherever they lie in the global tensor (`parallel/shards.py`).
The largest logits are all-reduced over the ranks that computed logits (`HeadLogits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megavlm.arch.layers import LANGUAGE_LAYER, VISION_LAYER
from megavlm.arch.tensor_split import HeadSplit, language_split, vision_split
from megavlm.config.derived import decoder_layers, is_linear, of_layer
from megavlm.config.lora_config import clipped_parts
from megavlm.config.schema import Config, OptimizerConfig
from megavlm.model.attention import LogitAttention
from megavlm.model.vlm import VLMChunk, bare_chunk
from megavlm.optim.elementwise import ElementwiseOptimizer
from megavlm.parallel.shards import ShardLayout, ShardPlace, local_part

PROJECTIONS = ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
_ATTENTION = ".self_attention."


def clipped_layers(config: Config, *, tp: int = 1) -> dict[str, HeadSplit]:
    """Return the head split over `tp` ranks of each clipped layer by layer name, in order; {} without `--qk-clip`."""
    vision, language = config.model.vision, config.model.language
    layers = {"vision": (VISION_LAYER, vision.num_layers), "language": (LANGUAGE_LAYER, decoder_layers(language))}
    return {
        f"{kind}{number}": _split(kind, number, config, tp)
        for kind, count in (layers[part] for part in clipped_parts(config))
        for number in range(count)
        if kind == VISION_LAYER or not is_linear(language, number)
    }


def _split(kind: str, number: int, config: Config, tp: int) -> HeadSplit:
    if kind == VISION_LAYER:
        return vision_split(config.model.vision, tp)
    return language_split(of_layer(config.model.language, number), tp)


def row_factors(largest: Tensor, split: HeadSplit, options: OptimizerConfig) -> Tensor:
    """Return the factor of each row of a fused projection of queries, keys and values, given m_h [heads]; 1 for the
    rows that gate a head's output.
    """
    threshold = options.qk_clip_threshold
    shrink = torch.where(largest > threshold, threshold / largest, 1.0)  # γ; 1 where m is NaN
    grouped = shrink.view(split.groups, -1)
    key = grouped.amax(1, keepdim=True) ** 0.5  # queries take the rest
    queries = grouped / key
    if split.gated:  # each head's queries, then its gate
        queries = torch.stack([queries, torch.ones_like(queries)], dim=-1).flatten(1)
    return torch.cat([queries, key, torch.ones_like(key)], dim=1).flatten().repeat_interleave(split.width)


def projection_factors(largest: Tensor, split: HeadSplit, options: OptimizerConfig) -> dict[str, Tensor]:
    """Return the factors of the rows of each scaled projection, by the projection's name."""
    if split.latent is None:
        return {"linear_qkv": row_factors(largest, split, options)}
    threshold, head = options.qk_clip_threshold, split.latent
    shrink = torch.where(largest > threshold, threshold / largest, 1.0)[:, None]
    root = (shrink**0.5).expand(-1, head.still)
    queries = torch.cat([root, shrink.expand(-1, head.turning)], dim=1).flatten()
    keys = torch.cat([root, torch.ones_like(shrink).expand(-1, head.value)], dim=1).flatten()
    return {"linear_q_proj": queries, "linear_q_up_proj": queries, "linear_kv_up_proj": keys}


class QKClip:
    """Scales a rank's shards of projections at the end of each step of their optimizers."""

    def __init__(
        self,
        held: Iterable[tuple[ElementwiseOptimizer, Tensor, ShardLayout]],
        layers: Mapping[str, HeadSplit],
        options: OptimizerConfig,
    ) -> None:
        """`held` has (optimizer, fp32 weights, layout) of each parameter that this rank updates."""
        self._layers, self._options = layers, options
        self._factors: dict[tuple[str, str], Tensor] = {}
        parts: dict[int, tuple[ElementwiseOptimizer, list[tuple[tuple[str, str], Tensor, ShardPlace]]]] = {}
        for inner, weights, layout in held:
            layer, _, parameter = layout.key.partition(_ATTENTION)
            name = parameter.partition(".")[0]
            if layer in layers and name in PROJECTIONS:
                _, places = parts.setdefault(id(inner), (inner, []))
                places += [((layer, name), weights, place) for place in layout.places()]
        for inner, places in parts.values():
            inner.finish = partial(self._scale, places)

    def expect(self, largest: Tensor) -> None:
        """Set the largest logits for the next step: [heads of all layers] float64, layer by layer."""
        counts = [split.heads for split in self._layers.values()]
        self._factors = {
            (layer, name): factors
            for (layer, split), found in zip(self._layers.items(), largest.split(counts), strict=True)
            for name, factors in projection_factors(found, split, self._options).items()
        }

    def _scale(self, places: Iterable[tuple[tuple[str, str], Tensor, ShardPlace]]) -> None:
        for projection, weights, place in places:
            view, first = place.view(local_part(weights)), place.box.offset[0]
            factors = self._factors[projection][first : first + len(view)]
            factors = F.pad(factors, (0, len(view) - len(factors)), value=1.0)  # rows that are padding
            view.mul_(factors.to(view.device, view.dtype).view(-1, *(1,) * (view.ndim - 1)))


class HeadLogits:
    """Tracks the largest logit of each head, layer by layer, in the training passes since `clear`."""

    def __init__(self, chunks: Sequence[Any], config: Config, device: torch.device) -> None:
        """`chunks` are all chunks of this rank, including a colocated encoder's."""
        layers = clipped_layers(config)
        first = dict(zip(layers, accumulate((split.heads for split in layers.values()), initial=0), strict=False))
        self._count = sum(split.heads for split in layers.values())
        self._device = device
        self._seen = [each for chunk in chunks for each in _seen_in(bare_chunk(chunk), config, first, device)]

    def clear(self) -> None:
        """Reset the largest logits to 0 before the passes of a step."""
        for attention, _, _ in self._seen:
            attention.largest.zero_()

    def over_ranks(self) -> Tensor:
        """Return the largest logit of each head over all ranks [heads of all layers] float64; all ranks call it.

        A head without a positive logit has 0.
        """
        found = torch.zeros(self._count, dtype=torch.float64, device=self._device)
        for attention, local, places in self._seen:
            found[places] = attention.largest[local]
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found


def _seen_in(
    chunk: VLMChunk, config: Config, first: Mapping[str, int], device: torch.device
) -> Iterator[tuple[LogitAttention, Tensor, Tensor]]:
    """Yield (attention, local head indices, indices in the model's list of all heads) for each clipped layer."""
    splits = clipped_layers(config, tp=chunk.groups.dims.tp)
    for name, layer in chunk.transformer_layers:
        if name in first:
            attention: Any = layer.self_attention.core_attention
            assert isinstance(attention, LogitAttention), name
            heads = _model_heads(attention, splits[name], chunk.groups.tp.rank())
            pairs = [(local, first[name] + head) for local, head in enumerate(heads) if head is not None]
            local, places = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(device).unbind(-1)
            yield attention, local, places


def _model_heads(attention: Any, split: HeadSplit, rank: int) -> list[int | None]:
    """Return the model's query head for each head of an attention module; None for padding.

    Context-parallel ranks that exchange heads divide a tensor-parallel rank's heads equally and in order.
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
