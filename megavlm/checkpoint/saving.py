"""Write and commit a checkpoint, on all ranks together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megavlm.checkpoint import folders
from megavlm.checkpoint.manifest import SUMMARY, in_words
from megavlm.checkpoint.writing import SaveError, Share, Written, write_metadata, write_share
from megavlm.errors import UserError


def save_share(share: Share, summary: dict[str, Any], *, root: Path, keep: int) -> Path:
    """Write this rank's share; on rank 0 commit when all ranks have. Returns the folder; raises UserError."""
    iteration = summary["iteration"]
    folder = folders.temporary_for(root, iteration)
    whole = dict(share.whole)
    if dist.get_rank() == 0:
        whole[SUMMARY] = (json.dumps(summary, indent=2) + "\n").encode()
    complaint = _of_rank_0(lambda: folders.prepare(root, iteration))
    if complaint is None:
        try:
            mine: Written | str = write_share(folder, share.files, whole)
        except SaveError as error:
            mine = str(error)
        written: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, written)
        complaint = _of_rank_0(lambda: _commit(root, summary, share, written or [], keep))
    if complaint is not None:
        raise UserError(
            f"the checkpoint of iteration {iteration} cannot be saved to {root} ({complaint}): the ones before it are "
            "whole; make room or choose another --run-dir, and start again"
        )
    return folders.folder_for(root, iteration)


def _commit(root: Path, summary: dict[str, Any], share: Share, written: list[Written | str], keep: int) -> None:
    shares = []
    for each in written:
        if isinstance(each, str):
            raise SaveError(each)
        shares.append(each)
    assert share.metadata is not None
    iteration = summary["iteration"]
    write_metadata(folders.temporary_for(root, iteration), share.metadata, shares)
    folders.commit(root, iteration, {name: total for each in shares for name, total in each.sums.items()})
    folders.retain(root, keep)


def _of_rank_0(action: Callable[[], object]) -> str | None:
    """Do something on rank 0; return, on all ranks, why it failed."""
    message: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except SaveError as error:
            message = [str(error)]
        except OSError as error:
            message = [in_words(error)]
    dist.broadcast_object_list(message, src=0)
    return message[0]
