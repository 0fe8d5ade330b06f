"""Load a distributed checkpoint without unpickling anything of it, and verify what is read while it is read.

megatron-core and torch unpickle three things: the descriptions (`.metadata`), entries that are no tensors (random
states), and what is common to all ranks (`common.pt`). Here the first is read by `safety`, the others by
`torch.load(weights_only=True)`, which makes tensors and plain values only.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

from megavlm.backend import patches
from megavlm.checkpoint.archives import plain_values, tensor_in
from megavlm.checkpoint.safety import read_metadata
from megavlm.checkpoint.verified import VerifiedItems
from megavlm.errors import UserError
from megavlm.paths import open_regular


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill a sharded state dict from a checkpoint folder and return it; every rank calls it.

    Raises UserError, on all ranks, for a checkpoint that is unsafe or damaged.
    """
    patches.read_checkpoints_with(reader=Reader, planner=Planner)
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder), common_strategy=_Common())
    except CheckpointException as error:  # every rank gets the failures of all ranks
        rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise _damaged(folder, first, f", rank {rank}") from error
    except (CheckpointingException, OSError, TypeError, ValueError) as error:
        raise _damaged(folder, error) from error
    return loaded


def _damaged(folder: Path, error: BaseException, where: str = "") -> UserError:
    if isinstance(error, UserError):
        return error
    reason = str(error).strip().partition("\n")[0][:200]
    return UserError(f"{folder} cannot be loaded ({type(error).__name__}{where}: {reason}): use another checkpoint")


class Reader(FileSystemReader):
    """Reads the tensors of checkpoint files in place of torch's reader, with metadata that `safety` has checked.

    Each stored item is read once, in the order of the file, into memory that all items share, and verified there.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the metadata here: torch would turn a UserError that a reader raises later into another error."""
        super().__init__(folder)
        self._folder = Path(folder)
        self._metadata = read_metadata(self._folder)
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        self._items = VerifiedItems.of(self._folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan. Raises Damaged for bytes that are not what was written."""
        wanted: dict[str, dict[tuple[int, int], list[ReadItem]]] = {}
        for each in plan.items:
            place: _StorageInfo = self.storage_data[each.storage_index]
            wanted.setdefault(place.relative_path, {}).setdefault((place.offset, place.length), []).append(each)
        largest = max((length for places in wanted.values() for _, length in places), default=0)
        memory = torch.empty(largest, dtype=torch.uint8)
        for name, places in wanted.items():
            with open_regular(self._folder / name, buffering=0) as file:
                for (start, length), items in sorted(places.items(), key=lambda entry: entry[0]):
                    content = memory[:length]
                    self._items.read(file, name, start, content.numpy().data)
                    for item in items:
                        _fill(item, content, planner, f"{self._folder / name}")
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _fill(item: ReadItem, content: Tensor, planner: LoadPlanner, name: str) -> None:
    """Give a planner what it wants of a stored item."""
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(content.numpy().tobytes()))
        return
    stored = tensor_in(content, name)
    for axis, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(axis, start, size)
    target = planner.resolve_tensor(item).detach()
    if target.shape != stored.shape:
        raise UserError(f"{name} holds {list(stored.shape)} where {list(target.shape)} is wanted")
    target.copy_(stored)
    planner.commit_tensor(item, target)


class Planner(MCoreLoadPlanner):
    """megatron-core's load planner, except that entries other than tensors are read as plain values only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        target, place = (
            (self.original_state_dict, self.mappings[name]) if self.flatten_state_dict else (self.state_dict, (name,))
        )
        set_element(target, place, plain_values(value, name))


class _Common(TorchCommonLoadStrategy):
    """megatron-core's loader of `common.pt`, except that it reads tensors and plain values only."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return common_state(Path(checkpoint_dir))


def common_state(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint has once for all ranks: positions and settings. Raises UserError if it is damaged."""
    path = folder / COMMON_STATE_FNAME
    with open_regular(path) as file:
        found = plain_values(file, str(path))
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged (it holds no dict): use another checkpoint")
    return found
