"""Load the newest checkpoint that is not damaged, without unpickling anything.

Rank 0 reads and checks the description of a checkpoint, and broadcasts it. A record that all ranks of a group need is
read by one of them and broadcast; one rank reads most of a file, and opens it once. For a model with P parameters in
bf16, with fp32 masters and two moments, D data-parallel replicas read 12 P bytes in all, because weights are rounded
masters. If each replica read its own weights, they would read (12 + 2 D) P: at 1,024 ranks and D = 16 almost four times
as much. The sizes of the 2,048 files are read once, not twice by each rank.

Every rank verifies its records while it reads them. The ranks gather their errors before they use any loaded value, so
that all ranks resume from the same checkpoint.

megatron-core and torch unpickle the description (`.metadata`), each tensor, and the common state (`common.pt`).
megavlm reads `items.json` and `state.json`, which have the same content, and takes values from the files as bytes. So
`load` takes the steps of megatron-core's `dist_checkpointing.load` without the pickled files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from megavlm.backend import patches
from megavlm.checkpoint import folders
from megavlm.checkpoint.folders import Holds
from megavlm.checkpoint.items import OpenFiles, Record, read_items, read_state
from megavlm.checkpoint.manifest import Damaged, first_look
from megavlm.errors import UserError
from megavlm.parallel.rendezvous import exchanged_on, from_rank_0, of_all_ranks, on_rank_0

Loaded = TypeVar("Loaded")
_NOT_THE_FILES = (MemoryError, torch.OutOfMemoryError)  # why a load may fail although every byte is right
_WITHOUT = "Leave --no-fallback out to go on from an older one, or move this one away"


_Found = tuple[dict[str, Any], Metadata] | UserError  # common state and description, or the reason why there is none


def sharing_groups(chunks: Sequence[Any]) -> list[dist.ProcessGroup]:
    """Return the process groups whose ranks hold copies of the same parts of `chunks`, the largest first."""
    groups: dict[int, dist.ProcessGroup] = {}
    for each in (chunk.groups for chunk in chunks):
        for group in (each.collection.tp_dp_cp, each.dp_cp, each.collection.expt_dp, each.replicas):
            if group is not None and group.size() > 1:
                groups[id(group)] = group
    return sorted(groups.values(), key=dist.ProcessGroup.size, reverse=True)


Turn = tuple[dist.ProcessGroup | None, int]  # a group that shares a read, and the rank of it that reads


def turns(
    wanted: Sequence[Hashable], groups: Sequence[dist.ProcessGroup], files: Sequence[Hashable] | None = None
) -> list[Turn]:
    """Assign each part of files that this rank needs to a group and a reader: the first group whose ranks all need the
    part, and one rank of it; (None, -1) if this rank reads the part alone.

    Ranks of a group need their shared parts in the same order. Repeats of a part that only some ranks have are not
    shared. With `files`, the file of each part, as few ranks as possible read the same file.
    """
    counts, seen, keys = Counter(wanted), Counter[Hashable](), list[Any]()
    for each in wanted:
        keys.append((each, counts[each], seen[each]))
        seen[each] += 1
    file_of = dict(zip(keys, files or [0] * len(keys), strict=True))
    found: dict[Any, Turn] = {}
    for group in groups:
        common, ranks = _needed_by_all(set(keys) - found.keys(), group), dist.get_process_group_ranks(group)
        parts: dict[Hashable, list[Any]] = {}
        for key in (key for key in keys if key in common):
            parts.setdefault(file_of[key], []).append(key)
        readers = max(1, len(ranks) // max(1, len(parts)))  # of each file
        for file, keys_of_file in enumerate(parts.values()):
            for number, key in enumerate(keys_of_file):
                found[key] = group, ranks[(file * readers + number % readers) % len(ranks)]
    return [found.get(key, (None, -1)) for key in keys]


def _needed_by_all(own: set[Any], group: dist.ProcessGroup) -> set[Any]:
    """Return what the sets of all ranks of a group have in common; every rank of the group calls it.

    The first rank sends its set, and the others say by a byte each what they have of it: to gather all sets would take
    as many times more bytes on each rank as the group has ranks.
    """
    sent = [list(own) if group.rank() == 0 else None]
    dist.broadcast_object_list(sent, group=group, group_src=0)
    offered = cast(list[Any], sent[0])
    if not offered:
        return set()
    needed = torch.tensor([each in own for each in offered], dtype=torch.uint8, device=exchanged_on())
    dist.all_reduce(needed, op=dist.ReduceOp.MIN, group=group)
    return {each for each, is_needed in zip(offered, needed.tolist(), strict=True) if is_needed}


def load(state: dict[str, Any], folder: Path, groups: Sequence[dist.ProcessGroup]) -> dict[str, Any]:
    """Fill a sharded state dict from a checkpoint folder and return it; every rank calls it.

    A record that all ranks of one of `groups` need is read by one of them. Raises UserError, on all ranks, for a
    checkpoint that is damaged.
    """

    def describe() -> _Found:
        try:
            return read_state(folder), read_items(folder)
        except (OSError, TypeError, ValueError) as error:  # a UserError is a ValueError
            return _unloadable(folder, error)

    found = from_rank_0(describe, cast(_Found, None))  # errors are returned: a raised one would lose its class
    if isinstance(found, UserError):
        raise found
    common, described = found
    patches.read_checkpoints_with(lambda path: VerifyingReader(path, described, groups))
    try:
        force_all_tensors_to_non_fp8(state)
        sharded, _, factories = load_preprocess(state)
        merge(common, TorchDistLoadShardedStrategy().load(extract_sharded_base(sharded)[0], folder))
        return cast(dict[str, Any], apply_factory_merges(common, factories))
    except (CheckpointException, CheckpointingException, OSError, TypeError, ValueError) as error:
        raise _unloadable(folder, error) from error


def _unloadable(folder: Path, error: BaseException) -> UserError:
    """Return the UserError that says in one line why a checkpoint cannot be loaded."""
    where = ""
    if isinstance(error, CheckpointException):  # every rank gets the failures of all ranks
        rank, (error, _) = min(error.failures.items(), key=lambda failure: failure[0])
        where = f", rank {rank}"
    if isinstance(error, UserError):
        return error
    reason = str(error).strip().partition("\n")[0][:200]
    return UserError(f"{folder} cannot be loaded ({type(error).__name__}{where}: {reason}): use another checkpoint")


class VerifyingReader(FileSystemReader):
    """Reads the tensors of checkpoint files in place of torch's reader, at the places that `items.json` lists.

    Each record is read once, in the order of the file, into a buffer that all records share, and verified there.
    """

    def __init__(
        self, folder: str | Path, described: Metadata | None = None, groups: Sequence[dist.ProcessGroup] = ()
    ) -> None:
        """Read the description, unless it is given. Doing so later would turn a UserError into an error of torch."""
        super().__init__(folder)
        self._metadata, self._groups = described or read_items(Path(folder)), groups
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan. Raises Damaged for bytes that differ from those written."""
        with closing(OpenFiles()) as files:
            self._read_all(plan, planner, files)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_all(self, plan: LoadPlan, planner: LoadPlanner, files: OpenFiles) -> None:
        wanted: dict[Record, list[ReadItem]] = {}
        for each in plan.items:
            wanted.setdefault(self.storage_data[each.storage_index], []).append(each)
        records = sorted(wanted, key=lambda record: (record.file.name, record.start))
        memory = torch.empty(max((record.length for record in wanted), default=0), dtype=torch.uint8)
        received = memory.to(device := exchanged_on())
        problems: list[UserError | OSError] = []
        names = [record.file.name for record in records]
        order = turns([(record.file.name, record.start) for record in records], self._groups, names)
        for record, (group, reader) in sorted(zip(records, order, strict=True), key=_place):
            content = received[: record.bytes]
            if group is None or reader == dist.get_rank():
                with _noted(problems):
                    content = self._read(record, memory, files)
            if group is not None and record.bytes:
                content = content.to(device)
                dist.broadcast(content, src=reader, group=group)
            with _noted(problems):
                for item in wanted[record]:
                    _fill(item, content.view(record.dtype).view(record.sizes), planner, str(record.file))
        if problems:
            raise problems[0]

    def _read(self, record: Record, memory: Tensor, files: OpenFiles) -> Tensor:
        """Read a record into `memory`; return a view of its values' bytes. Raises Damaged, UserError and OSError."""
        content = memory[: record.length]
        record.read(content.numpy().data, files.of(record.file))
        begin = record.values_at(content.numpy().data) - record.start
        return content[begin : begin + record.bytes]


def _place(pair: tuple[Record, Turn]) -> tuple[Any, ...]:
    """Return a sort key for records: first, file by file, the records that this rank reads alone; then shared records
    of all files in turn, so that each rank reads its files while other ranks broadcast.
    """
    record, (group, _) = pair
    return (0, record.file.name, record.start) if group is None else (1, record.start, record.file.name)


@contextmanager
def _noted(problems: list[UserError | OSError]) -> Iterator[None]:
    """Append a file's error to `problems` and go on, because other ranks wait for the broadcast."""
    try:
        yield
    except (UserError, OSError) as problem:
        problems.append(problem)


def _fill(item: ReadItem, stored: Tensor, planner: LoadPlanner, name: str) -> None:
    """Copy the part of a record that a planner's item asks for into its tensor. Raises UserError for a wrong shape."""
    for axis, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(axis, start, size)
    target = planner.resolve_tensor(item).detach()
    if target.shape != stored.shape:
        raise UserError(f"{name} holds {list(stored.shape)} where {list(target.shape)} is wanted")
    target.copy_(stored)
    planner.commit_tensor(item, target)


@dataclass(frozen=True)
class Choices:
    """The checkpoints that a run may start from, newest first, and a warning for each damaged one that is newer."""

    folders: tuple[Path, ...]
    remarks: tuple[str, ...] = ()
    fallback: bool = True  # whether an older one may stand in for a damaged one


def choices_in(root: Path, holds: Holds, *, fallback: bool = True) -> Choices:
    """Return the checkpoints of a folder that pass `first_look`, locked by `holds`.

    Raises UserError if all are damaged or, without `fallback`, if the newest one is.
    """
    whole, remarks = [], []
    for _, folder in reversed(folders.checkpoints(root)):
        if not holds.add(folder):
            continue  # another run that writes there has deleted it meanwhile
        problem = first_look(folder)
        if problem is None:
            whole.append(folder)
        elif not whole:
            remarks.append(f"checkpoint {folder} is damaged, and left out: {problem}")
            if not fallback:
                raise UserError(f"checkpoint {folder} is damaged: {problem}. {_WITHOUT}")
    if remarks and not whole:
        raise UserError(f"{remarks[0]}, and no older one is whole: move the folders away to start anew")
    return Choices(tuple(whole), tuple(remarks), fallback)


def choices_of(path: Path, holds: Holds, *, fallback: bool = True) -> Choices:
    """Return the checkpoints that `--load PATH` names (one, or all of a run), locked by `holds`.

    Raises UserError if there is none, or if it is damaged.
    """
    if folders.is_checkpoint(path):
        holds.add(path)
        if problem := first_look(path):
            raise UserError(f"--load {path} is damaged: {problem}. Give another checkpoint, or its run")
        return Choices((path,))
    for root in (path / "checkpoints", path):
        if (found := choices_in(root, holds, fallback=fallback)).folders:
            return found
    if (path / "config.json").exists():
        raise UserError(f"--load {path} is a Hugging Face folder: give it to --init-from")
    raise UserError(f"--load {path} holds no complete checkpoint: give a run folder or one of its iter_* folders")


def load_newest(
    choices: Choices, *, check: Callable[[Path], None], load: Callable[[Path], Loaded], say: Callable[[str], None]
) -> tuple[Path, Loaded]:
    """Load the newest checkpoint that is not damaged; return its folder and the result of `load`. All ranks call it.

    Raises UserError if all are damaged, or if `check`, which rank 0 calls, finds that one does not belong to this run.
    """
    for number, folder in enumerate(choices.folders):
        on_rank_0(partial(check, folder))
        loaded, problem = _load_and_verify(folder, load)
        if problem is None:
            return folder, loaded
        older = choices.folders[number + 1 :]
        if older and not choices.fallback:
            raise UserError(f"checkpoint {folder} is damaged: {problem}. {_WITHOUT}")
        if not older:
            raise UserError(f"checkpoint {folder} is damaged: {problem}. No older one is whole: load another run's")
        say(f"checkpoint {folder} is damaged: {problem}. Going on from {older[0].name}")
    raise AssertionError("no checkpoint to choose from")


def _load_and_verify(folder: Path, load: Callable[[Path], Loaded]) -> tuple[Any, str | None]:
    """Return (result of `load`, None), or (a value not to be used, the damage), the same damage on all ranks.

    Raises UserError, on all ranks, if a load failed although no rank found damage.
    """
    loaded, damaged, failure = None, None, None
    try:
        loaded = load(folder)
    except _NOT_THE_FILES:
        raise
    except Damaged as error:
        damaged = str(error)
    except (Exception, CheckpointException) as error:  # damaged files may raise any error
        failure = error
    said = None if failure is None else str(_unloadable(folder, failure))
    found = of_all_ranks((damaged, said))
    if problems := [each for each, _ in found if each]:
        return loaded, problems[0]
    if failures := [each for _, each in found if each]:
        raise UserError(failures[0]) from failure  # every byte is what was written: an older one would not load either
    return loaded, None
