"""Strategies of hypothesis for values that a JSON or YAML file may hold where another was expected."""

from __future__ import annotations

import json
from typing import Any

import yaml
from hypothesis import strategies as st

_NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 7, 2**16, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**9, 10**12, 10**30, 10**400]
) | st.integers(-(2**65), 2**65)
_FLOATS = st.floats() | st.sampled_from([1e-320, 1e308, 0.1, 255.0])
_TEXTS = st.text(max_size=40) | st.sampled_from(
    [
        "",
        "../secret",
        "/etc/passwd",
        "link",
        "\0",
        "\ud800",
        "a\nb",
        "x" * 5000,
        "9" * 5000,
        "NaN",
        "${HOME}",
        "~",
        "{{",
    ]
)
LEAVES = st.none() | st.booleans() | _NUMBERS | _FLOATS | _TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_TEXTS, inner, max_size=5),
    max_leaves=12,
)


def _deep(kind: str) -> Any:
    value: Any = 1
    for _ in range(900):
        value = [value] if kind == "list" else {"x": value}
    return value


ODD = VALUES | st.sampled_from(
    [_deep("list"), _deep("dict"), [0] * 5000, {str(number): number for number in range(999)}]
)


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the place of each value in a JSON value as a path of keys and indices; that of the whole is `()`.

    Places more than ten levels deep are left out: json.dumps fails on a value of 900 levels inside of another.
    """
    found = [place]
    if len(place) > 10:
        return found
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*place, key))
    return found


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return a value with another at a place."""
    if not place:
        return new
    copy = value.copy()
    copy[place[0]] = changed(value[place[0]], place[1:], new)
    return copy


@st.composite
def damaged(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """Return one of some JSON or YAML files with up to three of its values replaced, of any type, depth and length."""
    value = yaml.safe_load(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 3))):
        value = changed(value, draw(st.sampled_from(places(value))), draw(ODD))
    return json.dumps(value).encode()
