"""Write checkpoints without a run: any files, or tensors as a save describes them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megavlm.checkpoint import folders
from megavlm.checkpoint.manifest import FoldedSum, write_manifest

if TYPE_CHECKING:
    from torch import Tensor


def committed(root: Path, iteration: int, files: Mapping[str, bytes | str], *, attempt: str | None = None) -> Path:
    """Write a checkpoint of these files, and return its folder."""
    temporary = root / "tmp-written"
    for name, content in files.items():
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).write_bytes(content.encode() if isinstance(content, str) else content)
    final = folders.folder_for(root, iteration)
    folders.commit(temporary, final, {}, attempt=attempt)
    return final


def write_sums(folder: Path) -> None:
    """Write the sums of what the files hold, and those of blocks where `items.json` says that they are."""
    items = json.loads((folder / "items.json").read_text())
    for piece in (piece for each in items.values() for piece in each["pieces"]):
        _, _, file, start, length, _ = piece
        piece[5] = folded((folder / file).read_bytes()[start : start + length])
    (folder / "items.json").write_text(json.dumps(items))
    write_manifest(folder, {})


def folded(data: bytes) -> int:
    total = FoldedSum()
    total.update(memoryview(data))
    return total.value


def save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Save tensors by torch's own writer, and describe them as a save does."""
    import torch.distributed.checkpoint as dcp

    from megavlm.checkpoint.items import write_items

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this is one process
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    places = {index: (at.relative_path, at.offset, at.length, 0) for index, at in metadata.storage_data.items()}
    write_items(folder, metadata, places)
    write_sums(folder)
