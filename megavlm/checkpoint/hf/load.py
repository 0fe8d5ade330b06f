"""Load the weights of a rank's chunks from Hugging Face folders: each rank reads only the slices that it holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megavlm.checkpoint.hf.pretrained import Pretrained, refuse
from megavlm.config.schema import Config
from megavlm.model.vlm import VLMChunk
from megavlm.model.weights import index_of, initialize, named_shards, real_shape


@torch.no_grad()
def load_weights(
    chunks: Sequence[VLMChunk], pretrained_list: Sequence[Pretrained], config: Config, *, vocab_size: int
) -> None:
    """Set the weights of `chunks` from pretrained folders, and draw the others (such as a new projector's) at random.

    Every rank calls it. Raises UserError on all ranks, listing every missing, surplus or wrongly shaped tensor.
    """
    _check(chunks, pretrained_list, config, vocab_size=vocab_size)
    for chunk in chunks:
        initialize(chunk, config, vocab_size=vocab_size, drawn=lambda key: _provider(pretrained_list, key) is None)
        for shard in named_shards(chunk):
            if (pretrained := _provider(pretrained_list, shard.key)) is not None:
                real = real_shape(shard.key, tuple(shard.global_shape), config.model, vocab_size=vocab_size)
                shard.data.copy_(pretrained.read_slice(shard.key, real, index_of(shard)))


def _provider(pretrained_list: Sequence[Pretrained], key: str) -> Pretrained | None:
    return next((pretrained for pretrained in pretrained_list if pretrained.provides(key)), None)


def _check(
    chunks: Sequence[VLMChunk], pretrained_list: Sequence[Pretrained], config: Config, *, vocab_size: int
) -> None:
    shapes = {
        shard.key: real_shape(shard.key, tuple(shard.global_shape), config.model, vocab_size=vocab_size)
        for chunk in chunks
        for shard in named_shards(chunk)
    }
    for pretrained in pretrained_list:
        # A rank sees the shapes of its own chunks only, and all ranks must stop together.
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, pretrained.wrong_shapes(shapes))
        wrong = sorted({problem for problems in found for problem in problems})
        refuse(
            [*pretrained.problems(), *wrong],
            f"{pretrained.folder.path} does not hold the model that its config.json says",
        )
