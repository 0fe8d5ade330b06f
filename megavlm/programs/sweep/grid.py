"""Read a grid file and return the variants of a run, each with its name and training options, without torch."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any, Literal

from megavlm.command_line.configuration import configured
from megavlm.config.messages import did_you_mean, plain, shown
from megavlm.config.option import Count, option
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.rules.fields import record_of
from megavlm.rules.load import read_yaml

_MOST = 1000  # variants; SLURM's own limit of an array (MaxArraySize) is 1001 by default


@dataclass(frozen=True)
class Variant:
    """One run of a sweep. Variants that differ only in their seed share a `group`."""

    name: str
    group: str
    settings: Mapping[str, str]  # the varied options, as columns of the table
    flags: tuple[str, ...]  # of pretrain_vlm.py, --run-dir included


@dataclass(frozen=True)
class GridOptions:
    """The keys of a grid file that are plain values."""

    run_dir: str = option("", "Folder in which each variant has a folder of its own.")
    nodes: Count = option(1, "Machines of a variant.")
    processes: Count = option(1, "Processes of each machine.")
    seeds: tuple[int, ...] = option((), "Seeds, with each of which every variant trains.")
    metric: str = option("loss", "Key of metrics.jsonl that is compared.")
    mode: Literal["min", "max"] = option("min", "Which value of the metric is best.")
    average_last: Count = option(1, "Records at the end that are averaged.")


@dataclass(frozen=True)
class Grid(GridOptions):
    """The content of a grid file, with its keys as fields."""

    flags: tuple[str, ...] = ()
    product: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    list: Sequence[Mapping[str, Any]] = ({},)

    @property
    def world(self) -> int:
        return self.nodes * self.processes


def read_grid(path: Path) -> Grid:
    """Read the grid in a YAML file. Raises UserError, in one line, for an invalid grid."""
    data = read_yaml(path, what="grid")
    if not isinstance(data, Mapping):
        raise UserError(f"grid {plain(str(path))} is no mapping: write `run_dir: …`, and `product:` or `list:`")
    known = [each.name for each in fields(Grid)]
    if unknown := next((str(key) for key in data if key not in known), None):
        hint = did_you_mean(unknown, known) or f": it may have {', '.join(known)}"
        raise UserError(f"grid has no {plain(unknown)}{hint}")
    own = {each.name for each in fields(GridOptions)}
    plain_values = record_of(GridOptions, {key: data[key] for key in data if key in own}, name="grid")
    axes, entries, flags = data.get("product", {}), data.get("list", [{}]), _words(data.get("flags", ()))
    if not (isinstance(axes, Mapping) and all(isinstance(values, list) and values for values in axes.values())):
        raise UserError(f"grid: product must be options with lists of values, got {shown(axes)}")
    if not (isinstance(entries, list) and entries and all(isinstance(each, Mapping) for each in entries)):
        raise UserError(f"grid: list must be a list of options with values, got {shown(entries)}")
    if not plain_values.run_dir or "://" in plain_values.run_dir:
        raise UserError("grid: run_dir must be a folder of this machine, in which the variants train")
    varied = [str(key).lstrip("-") for each in (axes, *entries) for key in each]
    words = [word.partition("=")[0] for word in (*flags, *(f"--{key}" for key in varied))]
    if {"--run-dir", "--run.run-dir", "run.run-dir"} & {word.replace("_", "-") for word in words}:
        raise UserError("grid: it sets --run-dir: each variant has a folder of its own in run_dir")
    return Grid(**vars(plain_values), flags=flags, product=axes, list=entries)


def variants_of(grid: Grid) -> list[Variant]:
    """Return the variants of a grid: each entry of `list` with each combination of `product`, with each seed.

    Raises UserError for two variants of one name, and for more than 1000 variants.
    """
    number = math.prod(map(len, grid.product.values())) * len(grid.list) * len(grid.seeds or [0])
    if number > _MOST:
        raise UserError(f"grid: {number} variants are more than {_MOST}: vary fewer options")
    found = list(_variants(grid))
    twice = [name for name, count in Counter(variant.name for variant in found).items() if count > 1]
    if twice:
        raise UserError(f"grid: two variants are called {plain(twice[0])}: give entries of list a `name`, or vary more")
    return found


def _variants(grid: Grid) -> Iterator[Variant]:
    seeds: Sequence[int | None] = grid.seeds or (None,)
    for entry in grid.list:
        named = str(entry["name"]) if "name" in entry else None
        own = {key: value for key, value in entry.items() if key != "name"}
        for combination in product(*grid.product.values()):
            varied = {**own, **dict(zip(grid.product, combination, strict=True))}
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
    """Raise UserError, which names the variant, for the first variant that cannot train on the grid's processes.

    `further` is a check of each variant's configuration that may raise UserError, too.
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
    """Return the arguments that set an option: --tp 2 for `tp: 2`, --freeze vision for `freeze: [vision]`.

    A key in a section (`model.language.num_layers: 2`) is set by --set.
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
    return "none" if value is None else str(value)


def _file_name(text: str) -> str:
    """Convert a text to a folder name of at most 120 characters, with dashes for special characters."""
    return re.sub(r"[^\w.+=-]+", "-", text).strip("-.")[:120]
