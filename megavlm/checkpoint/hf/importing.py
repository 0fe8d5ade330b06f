"""Load Hugging Face weights into the chunks of a rank, without reading the slices of other ranks.

Data-parallel replicas need the same rows. Tensor-parallel ranks also do, for weights that are split by columns or not
at all. One of these ranks reads the rows, prefetches the next ones in threads, and broadcasts them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.checkpoint.hf.hf_files import DTYPES, THREADS, HfFolder, TensorInfo
from megavlm.checkpoint.hf.pretrained import Pretrained, refuse
from megavlm.checkpoint.hf.slices import reads_of
from megavlm.checkpoint.reading import sharing_groups, turns
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.model.vlm import HoldsWeights
from megavlm.model.weights import index_of, initialize, real_shape
from megavlm.parallel.rendezvous import from_rank_0, of_all_ranks

_AHEAD = 2 * THREADS  # prefetched reads


class Read(NamedTuple):
    """Rows [start, stop) of a tensor in one of the pretrained folders."""

    folder: int
    name: str
    start: int
    stop: int


def read_of(folder: int, info: TensorInfo, name: str, rows: slice) -> Read:
    """Return the `Read` of the given rows of a tensor in the pretrained folder with index `folder`."""
    start, stop, _ = rows.indices((info.shape or (1,))[0])
    return Read(folder, name, start, stop)


def shared_rows(
    reads: Sequence[Read],
    folders: Sequence[HfFolder],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    errors: list[str],
) -> Iterator[tuple[Read, Tensor]]:
    """Yield each read with its rows on the device. Rows that a whole group needs are read by one rank and broadcast.

    All ranks of a group make the reads that they share in the same order. A rank that cannot read a file appends the
    error to `errors` and goes on with zeros, because other ranks wait for the broadcast.
    """
    order = turns(reads, groups)
    reader_of = [dist.get_rank() if group is None else reader for group, reader in order]
    mine = (read for read, reader in zip(reads, reader_of, strict=True) if reader == dist.get_rank())
    with ThreadPoolExecutor(THREADS) as pool:

        def begun(read: Read) -> Future[Tensor]:
            return pool.submit(folders[read.folder].read, read.name, slice(read.start, read.stop))

        ahead = deque(map(begun, islice(mine, _AHEAD)))
        for read, (group, _), reader in zip(reads, order, reader_of, strict=True):
            info = folders[read.folder].tensors[read.name]
            shape = (read.stop - read.start, *info.shape[1:]) if info.shape else ()
            rows = None
            if reader == dist.get_rank():
                try:
                    rows = ahead.popleft().result().to(device)
                except (UserError, OSError, EOFError) as error:
                    errors.append(str(error))
                ahead.extend(map(begun, islice(mine, 1)))
            if rows is None:
                rows = torch.zeros(shape, dtype=DTYPES[info.dtype], device=device)
            if group is not None:
                dist.broadcast(rows.reshape(-1).view(torch.uint8), src=reader, group=group)
            yield read, rows


@dataclass(frozen=True)
class SharedFolder:
    """A `RowReader` for `Pretrained.read_slice` that takes its rows from `shared_rows`, not from the files."""

    tensors: Mapping[str, TensorInfo]
    number: int
    rows: Iterator[tuple[Read, Tensor]]

    def read(self, name: str, rows: slice) -> Tensor:
        """Return the rows of the next shared read, which must be the read of `rows` of the tensor `name`."""
        read, found = next(self.rows)
        assert read == read_of(self.number, self.tensors[name], name, rows), f"{read} is next, not {name} {rows}"
        return found


@torch.no_grad()
def load_weights(
    chunks: Sequence[HoldsWeights], pretrained_list: Sequence[Pretrained], config: Config, *, vocab_size: int
) -> None:
    """Load the weights of `chunks` from pretrained folders; initialize others (as of a new projector) at random.

    Every rank calls it; rows that several ranks need are read by one of them. Raises UserError on all ranks: it lists
    every missing, surplus or wrongly shaped tensor, or names a file that cannot be read.
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
        if problems := _lines_of_all(errors):
            raise UserError(problems[0])


def _lines_of_all(lines: list[str]) -> list[str]:
    """Gather `lines` from all ranks and return them sorted, without repeats."""
    return sorted({line for each in of_all_ranks(lines) for line in each})


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
            [*problems, *_lines_of_all(pretrained.wrong_shapes(shapes))],
            f"{pretrained.folder.path} does not hold the model that its config.json says",
        )
