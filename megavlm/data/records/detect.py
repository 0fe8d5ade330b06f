"""Detect the kind of a data set's records, or say what they have, and what would make them one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megavlm.config.messages import did_you_mean, plain, shown
from megavlm.config.schema import DatasetConfig
from megavlm.data.records.container import Container, renamed
from megavlm.data.records.shapes import SHAPES, columns_of, shape_of
from megavlm.data.records.turns import VISUALS
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample
from megavlm.paths import open_regular

_LOOKED_AT = 100  # most records that are read to find a good one
_NAMED = 30  # most of their fields that a message names
_PREFERENCES = ("chosen", "rejected")  # fields of records for DPO
_PICTURE = re.compile("image|img|pic|photo|video|figure|frame|jpe?g|png", re.IGNORECASE)
_PICTURE_FILES = (".jpg", ".jpeg", ".png", ".webp")  # ends of texts that name one
_LISTED = re.compile(rb'"file_name"\s*:\s*"([^"]+)"')  # a data set of LLaMA-Factory
_WRAPPED = re.compile(rb'\s*\{\s*"(\w{1,40})"\s*:\s*\[\s*\{')


def _kinds(source: DatasetConfig) -> list[str]:
    """Return the kinds that the records may be of, in the order in which they are tried: first those of which
    `columns` names a needed field.
    """
    if source.kind != "auto":
        return [source.kind]
    mapped = source.columns or {}
    return sorted(SHAPES, key=lambda kind: not any(name in mapped for group in SHAPES[kind].needs for name in group))


def check_columns(source: DatasetConfig) -> None:
    """Raise UserError for `columns` that give a value to a field that no kind of record has."""
    known = dict.fromkeys(name for shape in SHAPES.values() for name in (*shape.fields, *VISUALS))
    for name, column in (source.columns or {}).items():
        if name not in known:
            turned = f": turn it round, {column}:{name}" if column in known else did_you_mean(name, known)
            hint = turned or f": use one of {', '.join(known)}"
            raise wrong(source, f"has columns={plain(name)}:{plain(column)}, but {plain(name)} is not read{hint}")


def columns_read(source: DatasetConfig, names: Sequence[str]) -> list[str]:
    """Return the columns of a table that are read, by their names in the file."""
    columns = {name: column for name, column in (source.columns or {}).items() if column in names}
    kept = [name for name in names if name not in columns.values()]
    wanted = {*columns_of(_kinds(source), [*kept, *columns]), "chosen"}
    read = wanted.intersection(kept) | {columns[name] for name in wanted.intersection(columns)}
    return [name for name in names if name in read]


@dataclass
class _Look:
    """What the first records of a data set have."""

    has: dict[str, Any]  # each field with its first value that is not null
    kind: str | None = None
    records: int = 0  # that are objects
    bad: list[str] = field(default_factory=list)  # what the others are


def kind_of(source: DatasetConfig, container: Container, first: Path) -> tuple[str, list[str]]:
    """Return the kind of the records, that of the first one that has all fields of a kind, and fields that look like
    their pictures where none are read. `first` is the first file.

    Raises UserError if none of the first records has, or if none has a field that `columns` names.
    """
    look, columns = _look(source, container), source.columns or {}
    if look.kind is None and first.name == "dataset_info.json":
        with open_regular(first) as file:
            names = _LISTED.findall(file.read(2**20))
        which = f"as {first.parent / names[0].decode(errors='replace')}" if names else "which it describes"
        raise wrong(source, f"describes data sets, and has no records: name their files, {which}")
    if look.kind is None and {"images", "annotations"} <= look.has.keys():
        raise wrong(source, "has annotations as COCO has them: write a conversation for each image (docs/data.md)")
    if look.kind is None and (inner := _wrapped(first)) is not None:
        what = f"is an object whose {shown(inner)} holds the records"
        raise wrong(source, f"{what}: write that array itself, as jq .{inner} FILE > NEW does")
    if not look.has or (look.bad and not look.records):
        what = f"has no record among its first {len(look.bad)} ({''.join(look.bad[:1])})"
        raise wrong(source, f"{what}: write JSON Lines or an array of objects, in UTF-8")
    valued = [*columns, *(name for name, value in look.has.items() if value is not None)]
    near = SHAPES[max(_kinds(source), key=lambda kind: (SHAPES[kind].share(valued), kind == "vqa", kind != "pairs"))]
    lacks = [group[0] for group in near.missing(valued)]
    free = source.kind == "auto" and not columns and look.kind in (None, "text")
    if free and all(name in look.has for name in _PREFERENCES):
        turns = isinstance(look.has["chosen"], list) or len(lacks) == len(near.needs)
        field = "messages" if turns else [*lacks, "text"][0]
        what = "has preferences, which are not trained on: to train on the chosen answers, add"
        raise wrong(source, f"{what} columns={field}:chosen")
    unknown = [name for name in columns.values() if name not in look.has]
    if look.kind is not None and not unknown:
        return look.kind, _unread_pictures(look, columns)
    fields = [shown(name) + ("" if value is not None else " (null)") for name, value in look.has.items()]
    more = f" and {len(fields) - _NAMED} more" if len(fields) > _NAMED else ""
    what = f"has records of the fields {', '.join(fields[:_NAMED])}{more}"
    if unknown:
        hint = did_you_mean(unknown[0], look.has)
        raise wrong(source, f"{what}, and no {shown(unknown[0])}, which columns= names{hint}")
    needs = "; ".join(SHAPES[kind].words for kind in _kinds(source))
    if not lacks:
        raise wrong(source, f"{what}, but none of the first {look.records} has all of {near.words}: check what is null")
    pictures = [] if any(name in valued for name in VISUALS) else ["image"]
    mapping = "+".join(f"{name}:NAME" for name in [*lacks, *pictures])
    meant = f"say which they are, as {source.path},columns={mapping} (docs/data.md)"
    raise wrong(source, f"{what}, none of {needs}: {meant}")


def _look(source: DatasetConfig, container: Container) -> _Look:
    """Read records until one has all fields of a kind, and the fields that `columns` names have been seen."""
    kinds, columns = _kinds(source), source.columns or {}
    names = container.names or ()
    read = columns_read(source, names)
    look = _Look({name: None if name in read else True for name in names})
    if names and not read:
        return look
    for index in range(min(len(container), _LOOKED_AT)):
        try:
            record = container.read(index)
        except BadSample as error:
            look.bad.append(f"{container.label(index)}: {error.detail}")
            continue
        if not isinstance(record, Mapping):
            look.bad.append(f"{container.label(index)} is {shown(record)}")
            continue
        look.records += 1
        look.has |= {str(name): value for name, value in record.items() if look.has.get(str(name)) is None}
        look.kind = look.kind or shape_of(renamed(record, columns), kinds)
        if look.kind is not None and all(name in look.has for name in columns.values()):
            break
    return look


def _unread_pictures(look: _Look, columns: Mapping[str, str]) -> list[str]:
    """Return the fields that look like pictures, if the records have none that are read."""
    assert look.kind is not None
    had = {name for name, value in look.has.items() if value is not None}
    if had.intersection(VISUALS) or set(VISUALS).intersection(columns):
        return []
    read = {*SHAPES[look.kind].fields, *columns.values()}
    return sorted(
        name for name in had - read if _PICTURE.search(name) or str(look.has[name]).lower().endswith(_PICTURE_FILES)
    )


def _wrapped(path: Path) -> str | None:
    """Return the field of the object that a JSON file is, if it begins with a list of objects that are not turns."""
    with open_regular(path) as file:
        begins = _WRAPPED.match(file.read(4096))
    name = "" if begins is None else begins[1].decode(errors="replace")
    return None if any(name in shape.fields for shape in SHAPES.values()) else name or None


def wrong(source: DatasetConfig, what: str, file: Path | None = None) -> UserError:
    """Return the error for a data set, or a file of its folder, of which `what` is wrong."""
    inside = "" if file is None or file == Path(source.path) else f": {file.name}"
    return UserError(f"--datasets {source.path}{inside} {what}")
