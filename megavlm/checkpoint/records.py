"""Check what `torch.save` has written before torch opens it: tensors and plain values, no larger than the file.

torch's own `weights_only` keeps code out, but not memory: it makes a `bytearray` of any length, and storages, for a
file of a hundred bytes. Its list grows with the packages that are imported, too. So the pickle inside is read here
first, as data, with a table of the few objects that checkpoints hold.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import torch
from torch.distributed.checkpoint.utils import _ReaderView

from megavlm.checkpoint import restricted_pickle
from megavlm.checkpoint.restricted_pickle import is_size
from megavlm.errors import UserError

_LARGEST = 2**28  # bytes of a pickle without its tensors: positions and settings of a run take some kilobytes
_MOST_DIMENSIONS = 16
_KEYS = (str, int, bool, float, type(None))


@dataclass(frozen=True)
class _Storage:
    """Values of tensors, which are a file of their own in the archive."""

    bytes: int
    itemsize: int


class _Tensor:
    """Stands for a tensor whose description was found to fit its storage."""


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> _Tensor:
    """Check the arguments of `torch._utils._rebuild_tensor_v2` and `_v3`; the latter's third last is the type."""
    whole = type(size) is type(stride) is tuple and len(size) == len(stride) <= _MOST_DIMENSIONS
    if type(storage) is not _Storage or not whole or not all(map(is_size, (offset, *size, *stride))):
        raise ValueError("a tensor is described by something else")
    types = [each for each in rest if isinstance(each, torch.dtype)]
    held = storage.bytes // (types[0].itemsize if types else storage.itemsize)
    reaches = offset + 1 + sum((many - 1) * step for many, step in zip(size, stride, strict=True))
    if math.prod(size) and max(reaches, math.prod(size)) > held:
        raise ValueError("a tensor is larger than its storage")
    return _Tensor()


def _bytes(text: Any, encoding: Any) -> bytes:
    """What protocol 2 writes bytes as."""
    if type(text) is not str or type(encoding) is not str or encoding != "latin1":
        raise ValueError("bytes are described by something else")
    return text.encode("latin1")


def _ordered(*items: Any) -> OrderedDict[Any, Any]:
    if items:
        raise ValueError("a dict is described by something else")
    return OrderedDict()


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


# Bytes of an element, by torch's classes of storages; asked for their type, these warn of their removal.
_ITEMSIZES = {
    getattr(torch, f"{name}Storage"): size
    for size, names in {
        1: ("Untyped", "Byte", "Char", "Bool"),
        2: ("Half", "BFloat16", "Short"),
        4: ("Float", "Int"),
        8: ("Double", "Long", "ComplexFloat"),
        16: ("ComplexDouble",),
    }.items()
    for name in names
}
_CALLED = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("_codecs", "encode"): _bytes,
    ("collections", "OrderedDict"): _ordered,
}
_OBJECTS: dict[tuple[str, str], Any] = {
    **{(made.__module__, made.__name__): made for made in _ITEMSIZES},
    **{("torch", str(made)[6:]): made for made in vars(torch).values() if isinstance(made, torch.dtype)},
    **_CALLED,
}


class Part(_ReaderView):
    """torch's view of a part of a file, except that `seek` from the end takes negative offsets, as files do."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        super().seek(self.len + offset if whence == os.SEEK_END else offset, whence % os.SEEK_END)
        return self.tell()


def check_record(file: IO[bytes], name: str) -> None:
    """Raise UserError for a file that `torch.save` did not write, or that holds other than tensors and plain values.

    `name` is how messages call it. Its entries are stored, not compressed, so that they are no larger than the file.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            if not all(map(_is_stored, entries.values())):
                raise restricted_pickle.Refused("has compressed entries, which no checkpoint has")
            if len(entries) != len(archive.infolist()):
                raise ValueError("two of its entries have one name")
            [pickled] = [entry for entry in entries.values() if entry.filename.lower().endswith(".pkl")]
            if not pickled.filename.endswith("/data.pkl") or pickled.file_size > _LARGEST:
                raise ValueError(f"{pickled.filename!r:.80} is no description of tensors")
            home = pickled.filename.removesuffix("data.pkl")
            if not pickled.CRC:  # saved without sums of entries (`tensor_files`): zipfile must not compare
                del pickled.CRC
            restricted_pickle.load(
                archive.read(pickled),
                objects=_OBJECTS,
                call=_call,
                keys=_KEYS,
                persistent=partial(_storage, home=home, entries=entries),
            )
    except restricted_pickle.Refused as error:
        raise UserError(
            f"{name} holds something else than tensors and plain values (it {error}): it is not loaded; use a "
            "checkpoint whose origin you know"
        ) from None
    except Exception as error:  # damaged bytes may raise any error
        reason = str(error).partition("\n")[0][:200]
        raise UserError(f"{name} is damaged ({type(error).__name__}: {reason}): use another checkpoint") from error
    file.seek(0, os.SEEK_SET)


def _is_stored(entry: zipfile.ZipInfo) -> bool:
    return entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size


def _call(called: Any, arguments: tuple[Any, ...]) -> Any:
    if not any(called is each for each in _CALLED.values()):
        what = restricted_pickle.name_of(called)
        raise restricted_pickle.Refused(f"calls {what}, which is not called in any tensor checkpoint")
    return called(*arguments)


def _storage(key: Any, *, home: str, entries: dict[str, zipfile.ZipInfo]) -> _Storage:
    """Return the storage that a pickle names: ("storage", its class, number, device, elements)."""
    kind, made, number, device, elements = key if type(key) is tuple else ()
    known = isinstance(made, type) and made in _ITEMSIZES  # a tuple may take for ever to hash
    if not known or not type(kind) is type(number) is type(device) is str or kind != "storage" or not is_size(elements):
        raise ValueError("a storage is described by something else")
    size = elements * _ITEMSIZES[made]
    if size > entries[f"{home}data/{number}"].file_size:
        raise ValueError("a storage is larger than its data")
    return _Storage(size, _ITEMSIZES[made])
