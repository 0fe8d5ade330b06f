"""Check the files in `.nv-meta` of a prepared folder of tars, because energon opens each tar that they name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from megatron.energon.dataset_config import load_yaml

from megavlm.json_files import read_json
from megavlm.paths import read_bytes

META = ".nv-meta"
INFO = (".info.json", ".info.yaml")
_SPLITS = ("split.yaml", "split.json")
_LARGEST = 2**26  # most bytes of each file, enough for half a million tars
_BLOCK = 512  # least bytes that a sample takes in a tar
_PLACE = 8  # bytes that a sample takes in a tar's index
_WITHOUT_TAR = 2**20  # most samples of a tar that does not exist
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


def check_prepared(folder: Path) -> None:
    """Raise ValueError if `folder`/.nv-meta names tars outside of it, or more samples than its tars can hold."""
    counts = _read(folder, INFO).get("shard_counts")
    if not isinstance(counts, dict):
        raise ValueError(f"has no shard_counts in {META}")
    for name, count in counts.items():
        _check_name(name)
        if type(count) is not int or count < 0:
            raise ValueError(f"has {count!r:.80} samples in {name!r:.80}, according to {META}")
        if count > _most_samples(folder / name):
            raise ValueError(f"has {count} samples in {name}, according to {META}, and the tar is too small for them")
    for text in _texts(_read(folder, _SPLITS)):
        if _expanded(text) > len(counts) + 1:  # energon looks for each name in the counts
            raise ValueError(f"names more tars than it has in {META} ({text!r:.80})")


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    for name in names:
        path = folder / META / name
        if not path.exists():
            continue
        if name.endswith(".json"):
            return read_json(path, at_most=_LARGEST)
        try:
            found = load_yaml(read_bytes(path, at_most=_LARGEST))
        except Exception as error:  # a parser may raise any error
            raise ValueError(f"has a {META}/{name} that cannot be read ({' '.join(str(error).split())})") from error
        if isinstance(found, dict):
            return found
        raise ValueError(f"has a {META}/{name} that is no mapping")
    raise ValueError(f"has no {names[0]} in {META}")


def _most_samples(tar: Path) -> int:
    """Return how many samples a tar or its index can hold at most, by its size; 2**20 if neither exists."""
    sizes = [
        path.stat().st_size // each
        for path, each in ((tar, _BLOCK), (tar.with_name(f"{tar.name}.idx"), _PLACE))
        if path.exists()
    ]
    return max(sizes, default=_WITHOUT_TAR)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or "://" in name or "\0" in name:
        raise ValueError(f"names {name!r:.80} in {META}, which is no tar")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"names {name!r:.80} in {META}, which leads out of it")


def _texts(node: Any) -> Iterator[Any]:
    """Yield the names of tars in a split file, which are the leaves of its lists and mappings."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list):
            waiting.extend(each.values() if isinstance(each, dict) else each)
        else:
            yield each


def _expanded(name: Any) -> int:
    """Return an estimate of the number of names to which `{0..9}` and `{a,b}` in a name expand."""
    groups = re.findall(r"\{([^{}]*)\}", name) if isinstance(name, str) else []
    return math.prod(_choices(group) for group in groups)


def _choices(group: str) -> int:
    if (found := _RANGE.match(group)) is not None:
        return abs(int(found[2]) - int(found[1])) + 1
    return group.count(",") + 1
