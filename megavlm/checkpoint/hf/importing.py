"""Load Hugging Face weights: into the chunks of a rank, which reads only its slices, or into a checkpoint, streamed.

A checkpoint's pieces are declared from the files' headers, and each is read when it is written. The result is what a
run would have saved, without optimizer state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megavlm.checkpoint import folders
from megavlm.checkpoint.hf.hf_files import PIECE_BYTES
from megavlm.checkpoint.hf.pretrained import Pretrained, reads_of, refuse
from megavlm.checkpoint.hf.shared_reads import SharedFolder, read_of, shared_reads
from megavlm.checkpoint.hf.sidecar import NAME, write_sidecar
from megavlm.checkpoint.items import STATE
from megavlm.checkpoint.manifest import SUMMARY
from megavlm.checkpoint.staging import THREADS, Item, SaveError, write_metadata, write_share
from megavlm.checkpoint.summary import FORMAT
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.families.shared.table import Shape
from megavlm.files import replace_file
from megavlm.model.vlm import HoldsWeights
from megavlm.model.weights import index_of, initialize, real_shape
from megavlm.parallel.groups import from_rank_0


def import_checkpoint(
    pretrained: Pretrained, shapes: Mapping[str, Shape], config: Config, plan: Any, *, root: Path
) -> Path:
    """Write the checkpoint `root`/iter_0000000 with weights in the type of the files; return its folder.

    `shapes` has the shape of each parameter by global name, without the padding that tensor parallelism adds.
    """
    temporary = folders.prepare(root, 0)
    described, pieces = Metadata({}), list[tuple[MetadataIndex, ChunkStorageMetadata]]()
    for key, shape in shapes.items():
        found = list(_pieces(key, shape, dtype := pretrained.dtype_of(key)))
        chunks = [chunk for _, chunk in found]
        described.state_dict_metadata[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)
        pieces += found

    def values(number: int) -> Iterator[Item]:
        for index, chunk in pieces[number::THREADS]:
            part = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            read = pretrained.read_slice(index.fqn, shapes[index.fqn], part)
            yield index, read.to(pretrained.dtype_of(index.fqn))

    try:
        files = {f"__0_{number}.distcp": values(number) for number in range(THREADS)}
        written = write_share(temporary, files, {})
        write_metadata(temporary, described, [written])
    except SaveError as error:
        raise UserError(f"{temporary}: {error}") from error
    save_config(CheckpointingConfig("torch_dist"), str(temporary))
    torch.save({}, temporary / "common.pt")
    replace_file(temporary / STATE, "{}\n")
    write_sidecar(pretrained, temporary / NAME)
    summary = {
        "format": FORMAT,
        "contents": "weights",
        "iteration": 0,
        "consumed_samples": 0,
        "plan": plan.to_json(),
        "model": json.loads(json.dumps(asdict(config.model))),
    }
    replace_file(temporary / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return folders.commit(root, 0, written.sums)


def _pieces(key: str, shape: Shape, dtype: torch.dtype) -> Iterator[tuple[MetadataIndex, ChunkStorageMetadata]]:
    """Yield the pieces that make up a tensor: consecutive rows, at most PIECE_BYTES (at least one row) each."""
    rows = max(1, PIECE_BYTES // (math.prod(shape[1:]) * dtype.itemsize))
    for start in range(0, shape[0], rows):
        offsets = torch.Size([start, *(0 for _ in shape[1:])])
        sizes = torch.Size([min(rows, shape[0] - start), *shape[1:]])
        yield MetadataIndex(key, offsets), ChunkStorageMetadata(offsets, sizes)


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
        groups = (chunk.groups.collection.tp_dp_cp, chunk.groups.dp_cp, chunk.groups.collection.expt_dp)
        with shared_reads(reads, folders, groups, chunk.device) as shared:
            for shard, number, real in slices:
                folder = SharedFolder(folders[number].tensors, number, shared)
                shard.data.copy_(pretrained_list[number].read_slice(shard.key, real, index_of(shard), folder))


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
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, pretrained.wrong_shapes(shapes))
        refuse(
            [*problems, *sorted({problem for each in found for problem in each})],
            f"{pretrained.folder.path} does not hold the model that its config.json says",
        )
