"""Words for messages: suggestions, values made safe to print, and the numbers near one that does not fit."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

# Divisors above this are not listed: nobody splits a layer over more processes.
_LARGEST = 256

# What options of earlier versions are called now.
_RENAMED = {
    "use-distributed-optimizer": "--data-parallel-sharding optimizer",
    "no-use-distributed-optimizer": "--data-parallel-sharding none",
}


def renamed(word: str) -> str:
    """What to write for an option or key of an earlier version, as `": it is now X"`; nothing for other words."""
    now = _RENAMED.get(word.lstrip("-").replace("_", "-"))
    return f": it is now {now}" if now else ""


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`": did you mean X?"` for the nearest candidates, or nothing when none is near."""
    near = nearest_names(word, candidates)
    return f": did you mean {' or '.join(near[:3])}?" if near else ""


def nearest_names(word: str, candidates: Iterable[str]) -> list[str]:
    """The candidates that a word may have meant, best first; none where none is near."""
    names = {name: name.lstrip("-").replace("_", "-") for name in sorted(set(candidates))}
    bare = word.lstrip("-").replace("_", "-")
    if not bare:
        return []
    # Spelling comes last: `--train_iters` is a name but for its underscore, `--num-layers`, as other trainers call it,
    # is the end of two names here, and `--pipeline` begins two.
    near = [name for name, known in names.items() if known == bare]
    near = near or [name for name, known in names.items() if known.endswith(f"-{bare}")]
    near = near or [name for name, known in names.items() if known.startswith(f"{bare}-")]
    return sorted(near, key=len) or difflib.get_close_matches(word, names, n=1)


def shown(value: object) -> str:
    """A value for a message: on one line, printable and not longer than a line should be."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    if value is None:
        return "null"
    try:
        return " ".join(short.repr(value).split())
    except ValueError:  # Python refuses to write out integers of thousands of digits
        return f"a huge {type(value).__name__}"


def plain(word: str) -> str:
    """A word that a user typed, as it is where that is safe to print."""
    return word if word.isprintable() and len(word) <= 80 else shown(word)


def nearest(value: int, divisor: int) -> str:
    """The multiples on either side of a value that is none."""
    below, above = value // divisor * divisor, (value // divisor + 1) * divisor
    return f"use {above}" if below == 0 else f"use {below} or {above}"


def divisors(value: int) -> str:
    """The divisors of a number that a degree of parallelism may be, largest first, as "8, 4, 2 or 1"."""
    found = [str(divisor) for divisor in range(min(value, _LARGEST), 0, -1) if value % divisor == 0]
    return f"{', '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else found[0]
