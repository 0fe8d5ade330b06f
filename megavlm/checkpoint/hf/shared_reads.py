"""Read rows of Hugging Face files once for all ranks that need them.

Data-parallel copies need the same rows, and all tensor-parallel ranks those of weights that are cut by columns, or not
at all. One of them reads, the next ones ahead in threads, and sends the rows to the others.
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
from megavlm.checkpoint.reading import turns
from megavlm.errors import UserError

_AHEAD = 2 * THREADS  # reads that wait for their turn to be sent


class Read(NamedTuple):
    """Some rows of a tensor in one of the pretrained folders."""

    folder: int
    name: str
    start: int
    stop: int


def read_of(folder: int, info: TensorInfo, name: str, rows: slice) -> Read:
    """Return the read of these rows of a tensor."""
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

    All ranks of a group make the reads that they share in the same order. What is wrong with a file is noted in
    `errors`: the others wait for their turn.
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
    """A folder whose rows are read in turn with other ranks; what `HfFolder` is to `pretrained.slice_of`."""

    tensors: Mapping[str, TensorInfo]
    number: int
    rows: Iterator[tuple[Read, Tensor]]

    def read(self, name: str, rows: slice) -> Tensor:
        """Return the rows of the next read, which must be these."""
        read, found = next(self.rows)
        assert read == read_of(self.number, self.tensors[name], name, rows), f"{read} is next, not {name} {rows}"
        return found
