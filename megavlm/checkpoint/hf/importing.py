"""Load Hugging Face weights into the chunks of a rank, which reads only its slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megavlm.checkpoint.hf.pretrained import Pretrained, reads_of, refuse
from megavlm.checkpoint.hf.shared_reads import SharedFolder, read_of, shared_rows
from megavlm.checkpoint.reading import sharing_groups
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.model.vlm import HoldsWeights
from megavlm.model.weights import index_of, initialize, real_shape
from megavlm.parallel.rendezvous import from_rank_0


@torch.no_grad()
def load_weights(
    chunks: Sequence[HoldsWeights], pretrained_list: Sequence[Pretrained], config: Config, *, vocab_size: int
) -> None:
    """Set the weights of `chunks` from pretrained folders, and draw the others (such as a new projector's) at random.

    Every rank calls it; rows that several need are read by one. Raises UserError on all ranks, listing every missing,
    surplus or wrongly shaped tensor.
    """
    _check(chunks, pretrained_list, config, vocab_size=vocab_size)
    for chunk in chunks:
        initialize(chunk, config, vocab_size=vocab_size, drawn=lambda key: _provider(pretrained_list, key) is None)
        slices = [
            (shard, number, real_shape(shard.key, tuple(shard.global_shape), config.model, vocab_size=vocab_size))
            for shard in chunk.shards()
            if (number := _provider(pretrained_list, shard.key)) is not None
        ]
        folders = [pretrained.folder for pretrained in pretrained_list]
        reads = [
            read_of(number, folders[number].tensors[name], name, rows)
            for shard, number, real in slices
            for name, rows in reads_of(folders[number], pretrained_list[number].table[shard.key], real, index_of(shard))
        ]
        errors: list[str] = []
        rows = shared_rows(reads, folders, sharing_groups([chunk]), chunk.device, errors)
        for shard, number, real in slices:
            folder = SharedFolder(folders[number].tensors, number, rows)
            shard.data.copy_(pretrained_list[number].read_slice(shard.key, real, index_of(shard), folder))
        if problems := _of_all_ranks(errors):
            raise UserError(problems[0])


def _of_all_ranks(lines: list[str]) -> list[str]:
    """Return the lines of all ranks, sorted."""
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, lines)
    return sorted({line for each in found for line in each})


def _provider(pretrained_list: Sequence[Pretrained], key: str) -> int | None:
    return next((number for number, each in enumerate(pretrained_list) if each.provides(key)), None)


def _check(
    chunks: Sequence[HoldsWeights], pretrained_list: Sequence[Pretrained], config: Config, *, vocab_size: int
) -> None:
    shapes = {
        shard.key: real_shape(shard.key, tuple(shard.global_shape), config.model, vocab_size=vocab_size)
        for chunk in chunks
        for shard in chunk.shards()
    }
    for pretrained in pretrained_list:
        # A rank sees the shapes of its own chunks only, and all ranks must stop together. Rank 0 compares tied weights.
        problems = from_rank_0(pretrained.problems, list[str]())
        refuse(
            [*problems, *_of_all_ranks(pretrained.wrong_shapes(shapes))],
            f"{pretrained.folder.path} does not hold the model that its config.json says",
        )
