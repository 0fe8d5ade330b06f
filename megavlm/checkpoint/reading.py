"""Load a distributed checkpoint without unpickling anything of it.

megatron-core and torch unpickle three things: the descriptions (`.metadata`), entries that are no tensors (random
states), and what is common to all ranks (`common.pt`). Here the first is read by `safety`, the others by
`torch.load(weights_only=True)`, which makes tensors and plain values only.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import _ReaderView

from megavlm.backend import mcore_patches
from megavlm.checkpoint.safety import read_metadata
from megavlm.errors import UserError
from megavlm.paths import open_regular


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill a sharded state dict from a checkpoint folder and return it; every rank calls it.

    Raises UserError, on all ranks, for a checkpoint that is unsafe or damaged.
    """
    mcore_patches.read_checkpoints_with(reader=Reader, planner=Planner)
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
    """torch's reader of checkpoint files, with the metadata that `safety.read_metadata` has checked."""

    def __init__(self, folder: str | Path) -> None:
        """Read the metadata here: torch would turn a UserError that a reader raises later into another error."""
        super().__init__(folder)
        self._metadata = read_metadata(Path(folder))
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        part = cast("IO[bytes]", _Part(file, sinfo.offset, sinfo.length))
        check_stored(part, f"{self.path}/{sinfo.relative_path}")
        return super()._slice_file(file, sinfo)


class _Part(_ReaderView):
    """torch's view of a part of a file, except that `seek` from the end takes negative offsets, as files do."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        super().seek(self.len + offset if whence == os.SEEK_END else offset, whence % os.SEEK_END)
        return self.tell()


class Planner(MCoreLoadPlanner):
    """megatron-core's load planner, except that entries other than tensors are read as plain values only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        target, place = (
            (self.original_state_dict, self.mappings[name]) if self.flatten_state_dict else (self.state_dict, (name,))
        )
        set_element(target, place, _plain_values(value, name))


class _Common(TorchCommonLoadStrategy):
    """megatron-core's loader of `common.pt`, except that it reads tensors and plain values only."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        path = Path(checkpoint_dir) / COMMON_STATE_FNAME
        with open_regular(path) as file:
            check_stored(file, str(path))
            found: dict[str, Any] = _plain_values(file, str(path))
        return found


def _plain_values(file: IO[bytes], name: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own advice is to switch the check off
        raise UserError(
            f"{name} holds something else than tensors and plain values, or is damaged: it is not loaded; use a "
            "checkpoint whose origin you know"
        ) from error


def check_stored(file: IO[bytes], name: str) -> None:
    """Raise UserError for what `torch.save` does not write: compressed entries, which may be of any size."""
    try:
        with zipfile.ZipFile(file) as archive:
            compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError) as error:
        raise UserError(f"{name} is damaged ({error}): use another checkpoint") from error
    if compressed:
        raise UserError(f"{name} has compressed entries, which no checkpoint has: it is not loaded")
    file.seek(0)
