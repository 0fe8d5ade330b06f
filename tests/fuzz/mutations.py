"""Damage as disks, networks and attackers do it: flipped, lost, repeated and foreign bytes, and other JSON values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

WORDS = (
    *(b"\0", b"\xff" * 8, b"\n", b'"', b"[" * 2000, b"{", b"}", b",", b"../", b"NaN", b"1e999", b"9" * 30, b"-1"),
    *(b"null", b"link", b"/etc/passwd", b"\xed\xa0\x80", b"\x7f\xff\xff\xff", b"\0\0\0\x01"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 2**31, 2**63, 10**30, float("nan"), float("inf"), "", "x", "../x", "\0", "\ud800"),
    *("link", "/etc/passwd", "9" * 5000, "a\nb", 10**400, 2**53, 1e308, -0.0, False, 7),
    *([], {}, [[]], [0] * 100, {"x": {}}, "x" * 10_000),
)


def mutated(data: bytes, random: Random, *, others: Sequence[bytes] = ()) -> bytes:
    """Return `data` with one to four changes: of bytes, of values of JSON, or its end is that of one of `others`."""
    if others and random.random() < 0.1:
        other = random.choice(others)
        at = random.randint(0, len(data))
        return data[:at] + other[random.randint(0, len(other)) :]
    if data[:1] in (b"{", b"[") and random.random() < 0.5:
        with suppress(ValueError, RecursionError):
            value = json.loads(data)
            for _ in range(random.randint(1, 3)):
                value = _value(value, random)
            return json.dumps(value).encode()
    return _bytes(data, random)


def _bytes(data: bytes, random: Random) -> bytes:
    for _ in range(random.randint(1, 4)):
        at, end = sorted(random.randint(0, len(data)) for _ in range(2))
        end = min(end, at + random.choice((1, 4, 64, 10_000)))
        match random.randint(0, 6):
            case 0:
                data = data[:at]
            case 1:
                data = data[:at] + data[end:]
            case 2:
                data = data[:at] + data[at:end] * 2 + data[end:]
            case 3:
                data = data[:at] + random.choice(WORDS) + data[end:]
            case 4:  # a length or an offset
                size = random.choice((1, 2, 4, 8))
                number = random.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**62, 2**64 - 1, random.randint(0, 2**16)))
                written = (number % 256**size).to_bytes(size, random.choice(("little", "big")))
                data = data[:at] + written + data[at + size :]
            case _:
                flipped = bytes(each ^ 1 << random.randint(0, 7) for each in data[at : at + 1])
                data = data[:at] + flipped + data[at + 1 :]
    return data


def _value(value: Any, random: Random) -> Any:
    """Return a JSON value of which one, somewhere in it, is another, or is gone."""
    if not isinstance(value, dict | list) or not value or random.random() < 0.1:
        return random.choice(VALUES)
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = random.choice(keys)
    changed = value.copy()
    if random.random() < 0.1:
        del changed[key]
    else:
        changed[key] = _value(value[key], random)
    return changed
