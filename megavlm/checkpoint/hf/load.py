"""Fill a rank's chunks from Hugging Face folders: each rank reads the slices that it holds, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megavlm.checkpoint.hf.source import Origin, refuse
from megavlm.config.schema import Config
from megavlm.model.vlm import VLMChunk
from megavlm.model.weights import index_of, initialize, named_shards, real_shape


@torch.no_grad()
def load_weights(chunks: Sequence[VLMChunk], origins: Sequence[Origin], config: Config, *, vocab_size: int) -> None:
    """Read what the origins provide, draw the rest (a fresh projector); every rank calls it.

    Raises UserError on all ranks, listing every missing, surplus or wrongly shaped tensor.
    """
    _check(chunks, origins, config, vocab_size=vocab_size)
    for chunk in chunks:
        initialize(chunk, config, vocab_size=vocab_size, drawn=lambda key: _origin(origins, key) is None)
        for shard in named_shards(chunk):
            if (origin := _origin(origins, shard.key)) is not None:
                real = real_shape(shard.key, tuple(shard.global_shape), config.model, vocab_size=vocab_size)
                shard.data.copy_(origin.read_slice(shard.key, real, index_of(shard)))


def _origin(origins: Sequence[Origin], key: str) -> Origin | None:
    return next((origin for origin in origins if origin.provides(key)), None)


def _check(chunks: Sequence[VLMChunk], origins: Sequence[Origin], config: Config, *, vocab_size: int) -> None:
    shapes = {
        shard.key: real_shape(shard.key, tuple(shard.global_shape), config.model, vocab_size=vocab_size)
        for chunk in chunks
        for shard in named_shards(chunk)
    }
    for origin in origins:
        # A rank sees the shapes of its own chunks only, and all ranks must stop together.
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, origin.wrong_shapes(shapes))
        wrong = sorted({problem for problems in found for problem in problems})
        refuse([*origin.problems(), *wrong], f"{origin.folder.path} does not hold the model that its config.json says")
