"""A distributed checkpoint's `.metadata` is a pickle, and unpickling can run code: look before torch loads it.

Read once with an unpickler that knows only the few classes that describe tensors; whatever else the file names is
refused before anything of it is called. (`common.pt` and the random states go through `torch.load`, whose default
since torch 2.6 is the same kind of allow-list.)
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from megavlm.errors import UserError

# module → names that the metadata of a tensor checkpoint is made of
_ALLOWED = {
    "torch": {"Size", "device", "strided", "contiguous_format", "preserve_format", "channels_last"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"set", "frozenset", "dict", "list", "tuple", "int"},
}
_DTYPES = ("float", "bfloat", "int", "uint", "bool", "complex")


def check_metadata(folder: Path) -> None:
    """Refuse `.metadata` that names anything but descriptions of tensors. Raises UserError."""
    path = folder / ".metadata"
    try:
        _Reader(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise UserError(f"{folder} is not a complete distributed checkpoint: its .metadata cannot be read") from error
    except UserError as error:
        raise UserError(f"{path} {error}") from None
    except Exception as error:
        raise UserError(f"{path} is damaged ({error}): resume from another checkpoint") from error


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()) or (module == "torch" and name.startswith(_DTYPES)):
            return super().find_class(module, name)
        raise UserError(f"names {module}.{name}, which no tensor checkpoint needs: it is not loaded")
