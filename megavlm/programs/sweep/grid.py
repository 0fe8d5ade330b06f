"""Read a grid: which variants of a run there are, what each is called, and with which flags it trains. No torch."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from megavlm.config.messages import did_you_mean, plain, shown
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.programs.configuration import configured
from megavlm.rules.load import read_yaml

_MOST = 1000  # variants; SLURM's own limit of an array (MaxArraySize) is 1001 by default


@dataclass(frozen=True)
class Variant:
    """One run of a sweep. Variants that differ in their seed only are of one `group`."""

    name: str
    group: str
    settings: Mapping[str, str]  # what the grid varies, as columns of the table
    flags: tuple[str, ...]  # of pretrain_vlm.py, --run-dir included


@dataclass(frozen=True)
class Grid:
    """What a grid file says. Its keys are the names of these fields."""

    run_dir: str
    flags: tuple[str, ...] = ()
    nodes: int = 1
    processes: int = 1  # of each node
    product: Mapping[str, Sequence[Any]] | None = None
    list: Sequence[Mapping[str, Any]] | None = None
    seeds: Sequence[int] = ()
    metric: str = "loss"
    mode: str = "min"
    average_last: int = 1

    @property
    def world(self) -> int:
        return self.nodes * self.processes


def read_grid(path: Path) -> Grid:
    """Return the grid in a YAML file. Raises UserError, in one line, for whatever it cannot be."""
    data = read_yaml(path, what="grid")
    if not isinstance(data, Mapping):
        raise UserError(f"grid {plain(str(path))} is no mapping: write `run_dir: …`, and `product:` or `list:`")
    known = [field.name for field in fields(Grid)]
    for key in data:
        if key not in known and hasattr(Config(), str(key)):
            raise UserError(
                f"grid {plain(str(path))} has options of a run: write `flags: --config {path}` and `product:`"
            )
        if key not in known:
            hint = did_you_mean(str(key), known) or f": it may have {', '.join(known)}"
            raise UserError(f"grid has no {plain(str(key))}{hint}")
    values = {**data, "flags": _words(data.get("flags", ()))}
    for key, fits, what in _KINDS:
        if (value := values.get(key)) is not None and not fits(value):
            raise UserError(f"grid: {key} must be {what}, got {shown(value)}")
    if "://" in str(values.get("run_dir", "")):
        raise UserError(f"grid: run_dir {values['run_dir']} is no folder: mount the storage, and name the folder there")
    if "run_dir" not in values:
        raise UserError("grid has no run_dir: the variants train in folders of it")
    varied = [key for each in (values.get("product") or {}, *(values.get("list") or ())) for key in each]
    words = [word.partition("=")[0] for word in (*values["flags"], *(f"--{str(key).lstrip('-')}" for key in varied))]
    if {"--run-dir", "--run.run-dir", "run.run-dir"} & {word.replace("_", "-") for word in words}:
        raise UserError("grid: it sets --run-dir: each variant has a folder of its own in run_dir")
    return Grid(**{key: value for key, value in values.items() if value is not None})


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


_KINDS = (
    ("run_dir", lambda value: isinstance(value, str) and value, "a folder"),
    ("nodes", _is_count, "a number from 1"),
    ("processes", _is_count, "a number from 1"),
    ("average_last", _is_count, "a number of records from 1"),
    (
        "product",
        lambda v: isinstance(v, Mapping) and v and all(map(_is_list, v.values())),
        "options with lists of values",
    ),
    ("list", lambda v: _is_list(v) and all(isinstance(each, Mapping) for each in v), "a list of options with values"),
    ("seeds", lambda v: _is_list(v) and all(isinstance(each, int) for each in v), "a list of whole numbers"),
    ("metric", lambda value: isinstance(value, str), "a key of metrics.jsonl"),
    ("mode", lambda value: value in ("min", "max"), "min or max"),
)


def variants_of(grid: Grid) -> list[Variant]:
    """Return the variants: each combination of `product` with each entry of `list`, with each seed.

    Raises UserError for names that are equal, and for too many variants.
    """
    number = math.prod(map(len, (grid.product or {}).values())) * len(grid.list or [{}]) * len(grid.seeds or [0])
    if number > _MOST:
        raise UserError(f"grid: {number} variants are more than {_MOST}: vary fewer options")
    found = list(_variants(grid))
    twice = [name for name, count in Counter(variant.name for variant in found).items() if count > 1]
    if twice:
        raise UserError(f"grid: two variants are called {plain(twice[0])}: give entries of list a `name`, or vary more")
    return found


def _variants(grid: Grid) -> Iterator[Variant]:
    axes = grid.product or {}
    seeds: Sequence[int | None] = grid.seeds or (None,)
    for entry in grid.list or [{}]:
        named = str(entry["name"]) if "name" in entry else None
        own = {key: value for key, value in entry.items() if key != "name"}
        for combination in product(*axes.values()):
            varied = {**own, **dict(zip(axes, combination, strict=True))}
            parts = [f"{key}-{_text(value)}" for key, value in varied.items() if named is None or key not in own]
            group = _file_name("_".join([*([named] if named else []), *parts]) or "base")
            for seed in seeds:
                name = group if seed is None else f"{group}_seed-{seed}"
                settings = {key: _text(value) for key, value in varied.items()}
                extra = {} if seed is None else {"seed": seed}
                words = [word for key, value in {**varied, **extra}.items() for word in _flag(key, value)]
                run_dir = str(Path(grid.run_dir) / name)
                yield Variant(name, group, settings, (*grid.flags, *words, "--run-dir", run_dir))


def check_variants(grid: Grid, variants: Sequence[Variant], *, further: Callable[[Config], None]) -> None:
    """Raise UserError, which names the variant, for the first whose options could not run on so many processes, or that
    does not pass a further check.
    """
    for variant in variants:
        try:
            further(configured(variant.flags, world=grid.world))
        except UserError as error:
            raise UserError(f"variant {variant.name}: {error}") from None


def _words(flags: Any) -> tuple[str, ...]:
    if isinstance(flags, str):
        try:
            return tuple(shlex.split(flags))
        except ValueError as error:
            raise UserError(f"grid: flags cannot be read: {error}") from None
    if isinstance(flags, list | tuple) and not any(isinstance(word, list | dict) for word in flags):
        return tuple(map(_text, flags))
    raise UserError(f"grid: flags must be a text or a list of words, got {shown(flags)}")


def _flag(key: str, value: Any) -> list[str]:
    """Return the words that set an option: --tp 2 of `tp: 2`, --freeze vision of `freeze: [vision]`, and of a key in a
    section (`model.language.num_layers: 2`) --set with it.
    """
    if "." in str(key):
        return ["--set", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    flag = "--" + str(key).lstrip("-").replace("_", "-")
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{flag[2:]}"]
    return [flag, *map(_text, value)] if isinstance(value, list) else [flag, _text(value)]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_text, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    text = "none" if value is None else str(value)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise UserError(f"grid: {shown(text)} is no text: it has half of a character") from None
    if "\0" in text:
        raise UserError(f"grid: {shown(text)} has a NUL, which no option can have")
    return text


def _file_name(text: str) -> str:
    """Return the text as the name of a folder: whatever may mean something else there is a dash."""
    return re.sub(r"[^\w.+=-]+", "-", text).strip("-.")[:120]
