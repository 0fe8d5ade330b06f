"""Read rows of Hugging Face files once for all ranks that need them.

Data-parallel copies need the same rows, and all tensor-parallel ranks those of weights that are cut by columns, or not
at all. One of them reads, the next ones ahead in threads, and sends the rows to the others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.checkpoint.hf.hf_files import DTYPES, THREADS, HfFolder, TensorInfo
from megavlm.errors import UserError

_AHEAD = 2 * THREADS  # reads that wait for their turn to be sent


class Read(NamedTuple):
    """Some rows of a tensor in one of the pretrained folders."""

    folder: int
    name: str
    start: int
    stop: int


def group_of(
    read: Read, wanted: Mapping[int, Counter[Read]], candidates: Sequence[Sequence[int]], *, rank: int
) -> int | None:
    """Return the index of the first group whose ranks all need these rows as often as `rank`; None if there is none."""
    times = wanted[rank][read]
    return next(
        (
            number
            for number, ranks in enumerate(candidates)
            if len(ranks) > 1 and all(wanted.get(other, Counter())[read] == times for other in ranks)
        ),
        None,
    )


@dataclass(frozen=True)
class _Turn:
    """A read, the rank that makes it, and the group to which that rank sends the rows (None: it keeps them)."""

    read: Read
    group: dist.ProcessGroup | None
    reader: int


class SharedReads:
    """Gives this rank its rows in order. Rows that a whole group needs are read by one of its ranks and broadcast.

    Every rank of a stage makes one, and all ranks of a group ask for the rows that they share in the same order.
    """

    def __init__(
        self,
        reads: Sequence[Read],
        folders: Sequence[HfFolder],
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        """Agree with the ranks of the first of `groups`, which has those of all others, on who makes which read."""
        self._folders, self._device = folders, device
        self.errors: list[str] = []
        rank, wanted = dist.get_rank(), {dist.get_rank(): Counter(reads)}
        candidates: list[list[int]] = []
        if groups[0].size() > 1:
            sent: list[Sequence[Read]] = [reads] * groups[0].size()
            dist.all_gather_object(sent, reads, group=groups[0])
            candidates = [dist.get_process_group_ranks(group) for group in groups]
            wanted = {other: Counter(each) for other, each in zip(candidates[0], sent, strict=True)}
        made = [0] * len(groups)
        self._turns = deque[_Turn]()
        for read in reads:
            number = group_of(read, wanted, candidates, rank=rank)
            if number is None:
                self._turns.append(_Turn(read, None, rank))
            else:
                reader = candidates[number][made[number] % len(candidates[number])]
                self._turns.append(_Turn(read, groups[number], reader))
                made[number] += 1
        self._mine: Iterator[_Turn] = iter([turn for turn in self._turns if turn.reader == rank])
        self._pool = ThreadPoolExecutor(THREADS)
        self._ahead = deque[Future[Tensor]](map(self._begun, islice(self._mine, _AHEAD)))

    def _begun(self, turn: _Turn) -> Future[Tensor]:
        read = turn.read
        return self._pool.submit(self._folders[read.folder].read, read.name, slice(read.start, read.stop))

    def next(self, read: Read) -> Tensor:
        """Return the rows of the next read, on the device. A file that cannot be read is noted in `errors`."""
        turn = self._turns.popleft()
        assert turn.read == read, f"{turn.read} is next, not {read}"
        info = self._folders[read.folder].tensors[read.name]
        if turn.reader == dist.get_rank():
            try:
                rows = self._ahead.popleft().result().to(self._device)
            except (UserError, OSError, EOFError) as error:  # the others wait for their turn
                self.errors.append(str(error))
                rows = torch.zeros(_shape(info, read), dtype=DTYPES[info.dtype], device=self._device)
            self._ahead.extend(map(self._begun, islice(self._mine, 1)))
        else:
            rows = torch.empty(_shape(info, read), dtype=DTYPES[info.dtype], device=self._device)
        if turn.group is not None:
            dist.broadcast(rows.reshape(-1).view(torch.uint8), src=turn.reader, group=turn.group)
        return rows

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _shape(info: TensorInfo, read: Read) -> tuple[int, ...]:
    return (read.stop - read.start, *info.shape[1:]) if info.shape else ()


@dataclass(frozen=True)
class SharedFolder:
    """A folder whose rows are read in turn with other ranks; what `HfFolder` is to `pretrained.slice_of`."""

    tensors: Mapping[str, TensorInfo]
    number: int
    reads: SharedReads

    def read(self, name: str, rows: slice) -> Tensor:
        return self.reads.next(read_of(self.number, self.tensors[name], name, rows))


def read_of(folder: int, info: TensorInfo, name: str, rows: slice) -> Read:
    """Return the read of these rows of a tensor."""
    start, stop, _ = rows.indices((info.shape or (1,))[0])
    return Read(folder, name, start, stop)


@contextmanager
def shared_reads(
    reads: Sequence[Read],
    folders: Sequence[HfFolder],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> Iterator[SharedReads]:
    """Return a context in which the ranks of `groups` make their reads in turn. Raises UserError on all of the world
    where one of them failed.
    """
    shared = SharedReads(reads, folders, groups, device)
    try:
        yield shared
    finally:
        shared.close()
    failed: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(failed, shared.errors)
    if problems := sorted({problem for each in failed for problem in each}):
        raise UserError(problems[0])
