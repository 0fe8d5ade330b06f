"""Read the samples of tars by number, for validation: training reads tars in order, through megatron-energon."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megavlm.config.schema import DatasetConfig
from megavlm.data.records import tars
from megavlm.data.records.opening import name_of
from megavlm.data.records.parts import Part, conversation_of_parts
from megavlm.data.records.split import key_of_parts
from megavlm.data.types import Conversation
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.paths import FileRange
from megavlm.storage import is_url


class TarRecords:
    """Implements `Records` on indexed tars: a record is a sample, which is the files that share a name."""

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self.name = name
        self.unread: Sequence[str] = ()
        self._paths = paths

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> Conversation:
        return conversation_of_parts(self._parts(index))

    def key(self, index: int) -> bytes:
        return key_of_parts(self._parts(index))

    def label(self, index: int) -> str:
        tar, place = self._find(index)
        return f"{self._paths[tar].name}/sample {place}"

    @cached_property
    def _offsets(self) -> list[NDArray[np.uint64]]:
        """Return where the samples of each tar begin, and where its last one ends."""
        return [np.fromfile(path.with_suffix(".tar.idx"), dtype="<u8") for path in self._paths]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([max(len(offsets) - 1, 0) for offsets in self._offsets], dtype=np.int64)

    def _find(self, index: int) -> tuple[int, int]:
        tar = int(np.searchsorted(self._ends, index, side="right"))
        return tar, index - (int(self._ends[tar - 1]) if tar else 0)

    def _parts(self, index: int) -> dict[str, Part]:
        """Return the files of a sample by extension. Raises BadSample if they cannot be read."""
        tar, place = self._find(index)
        start, end = (int(offset) for offset in self._offsets[tar][place : place + 2])
        if not 0 <= end - start <= tars.LARGEST_SAMPLE:
            raise BadSample(Reason.TRUNCATED, f"it has {end - start} bytes, more than {tars.LARGEST_SAMPLE}")
        sample = FileRange(self._paths[tar], start, end - start)
        try:
            with sample.open() as content, tarfile.open(fileobj=content, mode="r:", tarinfo=tars.PlainMember) as opened:
                opened.fileobject = partial(tars.Member, path=sample.path, start=start)  # type: ignore[assignment]
                return {
                    part: data.read()
                    for member in opened
                    if (part := tars.part_of(member)) is not None and (data := opened.extractfile(member)) is not None
                }
        except FileNotFoundError as error:
            raise BadSample(Reason.MISSING, str(error)) from error
        except (OSError, tarfile.TarError, ValueError, EOFError) as error:
            raise BadSample(Reason.TRUNCATED, f"{type(error).__name__}: {error}") from error


def open_tars(source: DatasetConfig, *, cache: Path) -> TarRecords:
    """Return the samples of a folder of tars, or of one tar, that `prepare_stream` has indexed, by number.

    Raises UserError for data elsewhere.
    """
    path = Path(source.path)
    if is_url(source.path) or path.suffix in (".yaml", ".yml"):
        raise UserError(
            f"{source.path} has no samples that can be read by number, as validation samples are: name local tars or "
            "files with --validation PATH"
        )
    home = tars.home_of(path, cache=cache)
    names = tars.tars_below(home) if path.is_dir() else [path.name]
    indexed = [home / name for name in names if (home / name).with_suffix(".tar.idx").is_file()]
    return TarRecords(name_of(source), indexed)
