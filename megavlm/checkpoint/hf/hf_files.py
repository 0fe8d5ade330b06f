"""Read a Hugging Face folder (config.json, rows of its safetensors tensors), and write safetensors files by rows.

Bytes of tensors are read and written at given offsets, without a file position, so threads can share a file.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megavlm.errors import UserError
from megavlm.families import family_of
from megavlm.families.shared.family import LANGUAGE_ALONE
from megavlm.families.shared.settings import Settings
from megavlm.files import open_new
from megavlm.json_files import read_json
from megavlm.paths import Escapes, inside

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Types that files may also have, and that hold weights only together with scales (`quantized.py`).
_WITH_SCALES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
STORED = DTYPES | _WITH_SCALES
# Tensors are read and written in pieces of this size: small enough that the allocator reuses their memory.
PIECE_BYTES = 16 * 2**20
_COMPARED = 16  # rows of two matrices
# Each thread reads a piece and writes it. With several threads, the disk is busy while one thread copies in memory.
THREADS = 3

Task = TypeVar("Task")


def read_into(descriptor: int, tensor: Tensor, offset: int) -> None:
    """Fill a contiguous tensor with a file's bytes from `offset` on. Raises EOFError if the file ends too early."""
    view = _bytes(tensor)
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise EOFError(f"the file ends {len(view)} bytes before the tensor does")
        view, offset = view[count:], offset + count


def write_at(descriptor: int, tensor: Tensor, offset: int) -> None:
    """Write a tensor's values, row-major, to a file from byte `offset` on."""
    view = _bytes(tensor.contiguous())
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def for_each(task: Callable[[Task], None], items: Iterable[Task]) -> None:
    """Run `task` for all items on THREADS threads. Raises the first error and cancels the items not started yet."""
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(task, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class TensorInfo:
    """File, type, shape and byte offset of a tensor in a Hugging Face folder."""

    file: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' spelling: F32, BF16, …
    offset: int  # bytes from the beginning of the file to its first byte


class HfFolder:
    """Reads names, shapes and rows of the tensors of a Hugging Face folder. Threads may share it.

    `remark` is what a run says of how it reads them.

    The safetensors library checks the files. Values are read without the library, at the offsets in the headers: the
    library maps files into memory, and values that were read stay in memory as long as the file is open.
    """

    remark = ""

    def __init__(self, path: Path, *, weights: bool = True) -> None:
        """Find the weight files. Raises UserError if `path` is no folder or, with `weights`, if the folder holds no
        safetensors files.
        """
        self.path = path
        if not path.is_dir():
            raise UserError(f"{path} is no folder: give that of a Hugging Face checkpoint, or the hub's OWNER/NAME")
        if not (path / "config.json").exists():
            _refuse_what_it_is(path)
        self.files = _weight_files(path) if weights or any(path.glob("*.safetensors")) else []

    @cached_property
    def settings(self) -> Settings:
        """Return the content of config.json."""
        file = self.path / "config.json"
        return Settings(read_json(file), str(file))

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor of the folder by name, in the order of the files."""
        found: dict[str, TensorInfo] = {}
        for file in self.files:
            for name, info in _header(self.path, file).items():
                if name in found:
                    raise UserError(f"{self.path}: {name} is in {found[name].file} and again in {file}: remove one")
                found[name] = info
        found = self.plain(found)
        for name, info in found.items():
            if info.dtype not in DTYPES:
                where = f"{self.path / info.file}: {name}"
                raise UserError(f"{where} is of type {info.dtype}, which cannot be read: save it as BF16 or F32")
        return found

    def plain(self, stored: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return the folder's tensors, given those in its files by name: of a `QuantizedFolder` they differ."""
        return stored

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor, unchecked."""
        return self.stored_rows(self.tensors[name], start, stop)

    def stored_rows(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor in the files; a scalar is a row."""
        trailing = info.shape[1:]
        out = torch.empty((stop - start, *trailing), dtype=STORED[info.dtype])
        with (self.path / info.file).open("rb", buffering=0) as file:
            read_into(file.fileno(), out, info.offset + start * math.prod(trailing) * out.element_size())
        return out

    def read(self, name: str, rows: slice) -> Tensor:
        """Return rows of a tensor in its type, with all of its other dimensions; for a scalar, a tensor [].

        Raises UserError for values that are NaN or infinite.
        """
        info = self.tensors[name]
        start, stop, _ = rows.indices((info.shape or (1,))[0])
        out = self.rows(name, start, stop)
        # `aminmax` gives NaN and infinities back, with no copy: `isfinite` takes a hundred times as long.
        if out.is_floating_point() and out.numel() and not all(bound.isfinite() for bound in torch.aminmax(out)):
            raise UserError(f"{name} of {self.path} has values that are NaN or infinite: copy {info.file} again")
        return out if info.shape else out[0]

    def copy(self, name: str, write: Callable[..., None]) -> None:
        """Read a tensor some rows at a time, and call `write(values, first_row=…)` with the rows of each read."""
        for run in self._runs(self.tensors[name]):
            write(self.read(name, run), first_row=run.start)

    def _runs(self, info: TensorInfo) -> Iterator[slice]:
        """Return the row ranges that divide a tensor into pieces of at most PIECE_BYTES, or of one row."""
        height, *trailing = info.shape or (1,)
        rows = max(1, PIECE_BYTES // max(1, math.prod(trailing) * DTYPES[info.dtype].itemsize))
        return (slice(start, start + rows) for start in range(0, height, rows))

    def same(self, name: str, other: str) -> bool:
        """Return whether two tensors agree in type, shape and values; both are read some rows at a time."""
        one, two = self.tensors[name], self.tensors[other]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        return all(torch.equal(self.read(name, run), self.read(other, run)) for run in self._runs(one))

    def apart(self, name: str, other: str) -> bool:
        """Return whether two matrices of one type and shape differ in each of 16 rows in the middle."""
        one, two = self.tensors[name], self.tensors[other]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        rows = slice(one.shape[0] // 2, one.shape[0] // 2 + _COMPARED)  # the first ones may be zeros in both
        return not (self.read(name, rows) == self.read(other, rows)).all(-1).any()


def _header(folder: Path, file: str) -> dict[str, TensorInfo]:
    """Return the tensors of a file in the order of its header. Raises UserError for a damaged file."""
    path = folder / file
    try:
        inside(folder, file)
        there = path.stat()
        return _parsed(folder, file, there.st_size, there.st_mtime_ns)
    except Escapes as error:
        raise UserError(f"{error}: put the file there itself") from error
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is no complete safetensors file ({error}): copy it again") from error


@lru_cache(maxsize=1024)
def _parsed(folder: Path, file: str, size: int, modified: int) -> dict[str, TensorInfo]:
    """Parse a header for `_header`; cached by size and modification time, as a run opens its folders several times."""
    path = folder / file
    with safe_open(str(path), framework="pt"):  # refuses a file that is truncated or contradicts itself
        pass
    with path.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        described: dict[str, Any] = json.loads(opened.read(length))
    described.pop("__metadata__", None)
    return {
        name: TensorInfo(file, tuple(entry["shape"]), entry["dtype"], offset=8 + length + entry["data_offsets"][0])
        for name, entry in described.items()
    }


# Folders that users mistake for a model: a file that identifies the kind of folder → the end of the error message.
_NO_MODELS = {
    "adapter_config.json": "is an adapter of PEFT: give the model that it was made for, or merge both with PEFT",
    "metrics.jsonl": "is a run: go on with it by --load, or write its weights with megavlm convert export",
    "megavlm.json": "is a checkpoint: go on with it by --load, or write its weights with megavlm convert export",
    "snapshots": "is a repository in the hub's cache: give the hub's OWNER/NAME, or a folder in its snapshots",
    "dataset_info.json": "is a data set: give it to --datasets, and a model here",
    "*.gguf": "holds GGUF weights, which cannot be trained: give the folder of the model that they were made of",
}


def _refuse_what_it_is(path: Path) -> None:
    """Raise UserError for a folder without config.json that is known to be something else."""
    for file, what in _NO_MODELS.items():
        if next(path.glob(file), None):
            raise UserError(f"{path} {what}")


def _weight_files(path: Path) -> list[str]:
    if (path / WHOLE).exists():  # as in Transformers, whatever lies beside it: an older index, Mistral's second copy
        return [WHOLE]
    if (path / INDEX).exists():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{path / INDEX} has no weight_map: the folder is damaged")
        files = list(dict.fromkeys(map(str, weight_map.values())))
        for file in files:
            try:
                inside(path, file)
            except (OSError, Escapes) as error:
                shown = repr(file) if len(file) < 100 else f"{file[:100]!r}…"
                raise UserError(
                    f"{path / INDEX} names {shown}, which is not in the folder: complete the download"
                ) from error
        return files
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if not files and any(next(path.glob(pattern), None) for pattern in _PICKLES):
        raise UserError(
            f"{path} holds pickled weights only, and unpickling can run code: save it again as safetensors "
            "(Transformers: model.save_pretrained(folder))"
        )
    if not files:
        raise UserError(f"{path} holds no *.safetensors: give a folder with a Hugging Face checkpoint")
    return files


class StreamedFile:
    """A safetensors file whose tensors are declared first; rows may then be written in any order, from any thread.

    The library's own writer wants all of a file in memory at once. The format is documented: 8 bytes with the header's
    length, little-endian; the header, JSON of name → type, shape and byte range, padded with spaces to a multiple of 8;
    then the bytes.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Write the header of a file; `tensors` has (type in safetensors' spelling, shape) of each tensor by name."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        self._tensors = tensors
        self._starts: dict[str, int] = {}
        for name, (dtype, shape) in tensors.items():
            size = math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
            self._starts[name] = offset
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._first = 8 + len(text)
        self.size = offset
        self._file = open_new(path, buffering=0)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._first + offset)

    def write(self, name: str, values: Tensor, *, first_row: int = 0) -> None:
        """Write rows of a tensor, which must have the declared type, from row `first_row` on."""
        dtype, shape = self._tensors[name]
        assert values.dtype == DTYPES[dtype], f"{name} was declared as {dtype}"
        row = math.prod(shape[1:]) * values.element_size()
        write_at(self._file.fileno(), values, self._first + self._starts[name] + first_row * row)

    def __enter__(self) -> StreamedFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()


def _architecture(folder: Path) -> str:
    """Return the `…ForConditionalGeneration` class that a folder's config.json names; "" if it names none."""
    match read_json(folder / "config.json").get("architectures"):
        case [str(name), *_] if name.endswith("ForConditionalGeneration"):
            return name
    return ""


def transformers_model(folder: Path, *, dtype: torch.dtype | str = torch.float32) -> Any:
    """Return the Transformers model of a folder in evaluation mode, on the CPU; `dtype` "auto" is the files' type.

    No code of the folder runs, nothing is fetched, and pickled weights are not read. Raises UserError where
    Transformers is not installed or refuses the folder.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError("Transformers, which runs the model, is not installed: pip install transformers") from error
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    # Architectures that share a `model_type` in config.json differ in their class names alone.
    family = family_of(HfFolder(folder).settings)
    words = family.parts == LANGUAGE_ALONE
    usual = transformers.AutoModelForCausalLM if words else transformers.AutoModelForImageTextToText
    kind = getattr(transformers, family.runs or _architecture(folder), usual)
    try:
        model = kind.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        raise UserError(f"Transformers cannot load {folder}: {reason}") from error
    family.complete(model)
    return model.eval()
