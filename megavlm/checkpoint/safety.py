"""Read the descriptions of a checkpoint's tensors (`.metadata`) without running any code that the file may contain.

The file is a pickle, and unpickling can run code. It is read once, by an interpreter of megavlm's own, which knows the
few classes that describe tensors and checks each of their fields. The result is handed to torch, which never opens the
file. Data files must lie in the checkpoint's own folder and be as long as the descriptions say.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.serialization import _get_layout

from megavlm.checkpoint import restricted_pickle
from megavlm.checkpoint.restricted_pickle import is_size
from megavlm.errors import UserError
from megavlm.paths import inside, read_bytes

# Bytes of a `.metadata`; 2,000 ranks with 10,000 pieces each stay below. Each piece has more bytes in the data files.
LARGEST, _WITHOUT_DATA = 2**30, 2**24
_MOST_DIMENSIONS = 16


class _Unread:
    """Stands for what no reader needs: the writers' plans, which megatron-core leaves in the file, and paths."""


# class → its fields, each with the types that it may have
_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    Metadata: {
        "state_dict_metadata": (dict,),
        "planner_data": (dict, type(None)),
        "storage_data": (dict,),
        "storage_meta": (StorageMeta, type(None)),
        "version": (str, type(None)),
        "mcore_data": (dict,),
        "all_local_plans": (list, type(None)),
    },
    StorageMeta: {
        "checkpoint_id": (str, _Unread, type(None)),
        "save_id": (str, type(None)),
        "load_id": (str, type(None)),
        "modules": (list,),
    },
    TensorStorageMetadata: {"properties": (TensorProperties,), "size": (torch.Size,), "chunks": (list,)},
    BytesStorageMetadata: {},
    ChunkStorageMetadata: {"offsets": (torch.Size,), "sizes": (torch.Size,)},
    MetadataIndex: {"fqn": (str,), "offset": (torch.Size, type(None)), "index": (int, type(None))},
    _StorageInfo: {
        "relative_path": (str,),
        "offset": (int,),
        "length": (int,),
        "transform_descriptors": (type(None),),  # others decompress, or run extensions
    },
}
_PROPERTIES = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)  # what TensorProperties is pickled as
_PATHS = ("pathlib", "pathlib._local")  # where Python up to 3.12, and from 3.13 on, says that paths are

_OBJECTS: dict[tuple[str, str], Any] = {
    **{(made.__module__, made.__name__): made for made in (*_FIELDS, TensorProperties, _MEM_FORMAT_ENCODING)},
    **{(made.__module__, made.__name__): _Unread for made in (SavePlan, WriteItem, TensorWriteData, _StoragePrefix)},
    **{(module, "PosixPath"): _Unread for module in _PATHS},
    (WriteItemType.__module__, WriteItemType.__name__): WriteItemType,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch", "Size"): torch.Size,
    **{("torch", str(made)[6:]): made for made in vars(torch).values() if isinstance(made, torch.dtype)},
}


def read_metadata(folder: Path) -> Metadata:
    """Return the content of `folder`/.metadata. Raises UserError if it is not plain, or contradicts the data files."""
    path = folder / ".metadata"
    try:
        data_files = sum(each.stat().st_size for each in folder.glob("*.distcp"))
        data = read_bytes(path, at_most=min(LARGEST, _WITHOUT_DATA + data_files))
    except OSError as error:
        raise UserError(f"{folder} is not a complete distributed checkpoint: its .metadata cannot be read") from error
    try:
        found = restricted_pickle.load(data, objects=_OBJECTS, call=_call, build=_build, keys=(str, MetadataIndex))
        _check(found, folder)
    except restricted_pickle.Refused as error:
        raise UserError(f"{path} {error}: it is not loaded") from None
    except Exception as error:  # damaged bytes may raise any error
        reason = str(error).partition("\n")[0][:200]
        raise UserError(f"{path} is damaged ({type(error).__name__}: {reason}): use another checkpoint") from error
    found.all_local_plans = None
    return found


def _call(called: Any, arguments: tuple[Any, ...]) -> Any:
    """Return an object. No message shows an argument, and none is hashed: what the pickle made may be deep or long."""
    if called is _Unread:
        return _Unread()
    if called is torch.Size:
        (sizes,) = arguments
        if type(sizes) not in (tuple, list) or len(sizes) > _MOST_DIMENSIONS or not all(map(is_size, sizes)):
            raise ValueError("the size of a tensor is no shape")
        return torch.Size(sizes)
    if any(called is each for each in (_get_layout, _MEM_FORMAT_ENCODING, WriteItemType)):
        if len(arguments) != 1 or type(arguments[0]) not in (int, str):
            raise ValueError(f"{called.__name__} is called with something else than its name")
        return called(*arguments)
    if arguments or type(called) is not type or not (called in _FIELDS or called is TensorProperties):
        raise restricted_pickle.Refused(
            f"calls {restricted_pickle.name_of(called)}, which is not called in any tensor checkpoint"
        )
    return object.__new__(called)


def _build(made: Any, state: Any) -> None:
    if type(made) is TensorProperties:
        if type(state) is not tuple or tuple(map(type, state)) != _PROPERTIES:
            raise ValueError("a tensor's properties are described by something else")
        made.__setstate__(state)
        return
    if type(made) is _Unread:
        return
    fields = _FIELDS.get(type(made))
    if fields is None or type(state) is not dict:
        raise restricted_pickle.Refused(f"sets the state of {type(made).__name__}")
    for name, value in state.items():
        if type(value) not in fields.get(name, ()):
            raise ValueError(f"{type(made).__name__}.{name:.80} is {type(value).__name__}")
    vars(made).update(state)


def _check(metadata: Any, folder: Path) -> None:
    """Raise ValueError or another error if descriptions are incomplete, or contradict each other or the files."""
    if type(metadata) is not Metadata:
        raise ValueError(f"it describes {type(metadata).__name__}")
    sizes: dict[str, int] = {}
    for index, place in metadata.storage_data.items():
        if type(index) is not MetadataIndex or type(place) is not _StorageInfo:
            raise ValueError("places of data are described by something else")
        if place.relative_path not in sizes:
            sizes[place.relative_path] = inside(folder, place.relative_path).stat().st_size
        if not 0 <= place.offset <= place.offset + place.length <= sizes[place.relative_path]:
            raise ValueError(f"{place.relative_path} is too short for {index.fqn}")
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str or type(entry) not in (TensorStorageMetadata, BytesStorageMetadata):
            raise ValueError(f"{name!r:.80} is described by {type(entry).__name__}")
        if type(entry) is TensorStorageMetadata:
            _check_tensor(name, entry, metadata.storage_data)
        elif MetadataIndex(name) not in metadata.storage_data:
            raise ValueError(f"{name} is nowhere")


def _check_tensor(name: str, entry: TensorStorageMetadata, places: dict[MetadataIndex, _StorageInfo]) -> None:
    elements = 0
    for chunk in entry.chunks:
        if type(chunk) is not ChunkStorageMetadata or not len(chunk.offsets) == len(chunk.sizes) == len(entry.size):
            raise ValueError(f"pieces of {name} are described by something else")
        spans = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        if any(offset + size > whole for offset, size, whole in spans):
            raise ValueError(f"a piece of {name} goes beyond it")
        held = math.prod(chunk.sizes)
        if held * entry.properties.dtype.itemsize > places[MetadataIndex(name, chunk.offsets)].length:
            raise ValueError(f"a piece of {name} is larger than its data")
        elements += held
    if elements != math.prod(entry.size):
        raise ValueError(f"pieces of {name} do not make up {list(entry.size)}")
