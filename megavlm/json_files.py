"""Read JSON from untrusted folders within size limits, and check types and ranges of its values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megavlm.errors import UserError
from megavlm.paths import read_bytes

LARGEST = 2**28  # bytes of a JSON file: an index of a million tensors has half of that


def read_json(file: Path, *, at_most: int = LARGEST) -> dict[str, Any]:
    """Return the JSON object in a regular file. Raises UserError for anything else, however deep or long it is."""
    try:
        values = json.loads(read_bytes(file, at_most=at_most))
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise UserError(f"{file} cannot be read as JSON ({reason}): the folder is incomplete or damaged") from error
    if not isinstance(values, dict):
        raise UserError(f"{file} is no JSON object: the folder is damaged")
    return values


def read_own(file: Path) -> dict[str, Any]:
    """Return the JSON object in a small file of a run; {} if the file is missing or holds anything else."""
    with suppress(UserError):
        return read_json(file, at_most=2**20)
    return {}


@dataclass(frozen=True)
class Expected:
    """A constraint on a JSON value: its description in `words`, for messages, and the test `fits`."""

    words: str
    fits: Callable[[Any], bool]

    def __or__(self, other: Expected) -> Expected:
        return Expected(f"{self.words} or {other.words}", lambda value: self.fits(value) or other.fits(value))


def whole(low: int, high: int) -> Expected:
    """Return the constraint of a whole number in [low, high]."""
    return Expected(
        f"a whole number from {low} to {high}", lambda value: _is_number(value, int) and low <= value <= high
    )


def number(low: float, high: float) -> Expected:
    """Return the constraint of a finite number in [low, high]."""
    return Expected(
        f"a number from {low:g} to {high:g}",
        lambda value: _is_number(value, int, float) and low <= value <= high,  # NaN is not
    )


def listed(of: Expected, fewest: int, most: int) -> Expected:
    """Return the constraint of a list of `fewest` to `most` values that fit `of`."""
    how_many = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return Expected(
        f"a list of {how_many} times {of.words}",
        lambda value: isinstance(value, list | tuple) and fewest <= len(value) <= most and all(map(of.fits, value)),
    )


def mapped(of: Expected) -> Expected:
    """Return the constraint of an object whose values all fit `of`."""
    return Expected(
        f"an object, each value {of.words}",
        lambda value: isinstance(value, Mapping) and all(map(of.fits, value.values())),
    )


def _is_number(value: Any, *types: type) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)  # which Python counts as a number


TEXT = Expected("a text", lambda value: isinstance(value, str) and len(value) < 2**20)
FLAG = Expected("true or false", lambda value: isinstance(value, bool))
OBJECT = Expected("an object", lambda value: isinstance(value, Mapping))


def check(values: Mapping[str, Any], expected: Mapping[str, Expected], where: str) -> None:
    """Raise UserError for the first value that violates its key's constraint in `expected`; null counts as absent."""
    for name, kind in expected.items():
        value = values.get(name)
        if value is not None and not kind.fits(value):
            shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:57]}…"
            raise UserError(f"{where}: {name} {shown} must be {kind.words}: correct it, or download the file again")
