"""Parts of messages: suggestions, printable values, and valid values near an invalid one."""

from __future__ import annotations

import difflib
import re
import reprlib
import traceback
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from pathlib import Path

# Larger divisors are not listed: no layer is split over more processes.
_LARGEST = 256

# Least similarity of two spellings of one word (`difflib`). With a lower one, --deepspeed is taken for --seed.
_LIKE = 0.75

# The hyphen of flags, and dashes by which word processors and chats replace it.
DASHES = "-–—−"


def did_you_mean(
    word: str, candidates: Iterable[str], *, aside: Collection[str] = (), written: Callable[[str], str] = str
) -> str:
    """Return `": did you mean X?"` for the candidates most similar to a word, or an empty string.

    Candidates in `aside` are suggested only if no other is as similar. `written` spells a candidate for the message.
    """
    near = nearest_names(word, candidates, aside=aside)
    return f": did you mean {' or '.join(map(written, near[:3]))}?" if near else ""


def nearest_names(word: str, candidates: Iterable[str], *, aside: Collection[str] = ()) -> list[str]:
    """Return the candidates similar to a word, best first; empty if none is similar."""
    names = {name: _bare(name) for name in sorted(set(candidates))}
    bare = _bare(word)
    if not bare:
        return []
    # First the same name with underscores (`--train_iters`), then names that end (`--num-layers`) or start
    # (`--pipeline`) with the word, the only one whose spelling begins with it, and similar spelling last.
    near = [name for name, known in names.items() if known == bare]
    near = near or [name for name, known in names.items() if known.endswith(f"-{bare}")]
    near = near or [name for name, known in names.items() if known.startswith(f"{bare}-")]
    near = [name for name in near if name not in aside] or near
    if near:
        return sorted(near, key=lambda name: (name.count("-"), len(name)))
    begun = [name for name, known in names.items() if known.startswith(bare)]
    if len(begun) == 1 and len(bare) > 4:
        return begun
    alike = difflib.get_close_matches(bare, names.values(), n=1, cutoff=_LIKE)
    return [name for name, known in names.items() if known in alike]


def _bare(word: str) -> str:
    return word.lstrip(DASHES).replace("_", "-").lower()


def shown(value: object) -> str:
    """Return a value as text for a message: printable, on one line and shortened to about 80 characters."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    if value is None:
        return "null"
    try:
        return " ".join(short.repr(value).split())
    except ValueError:  # Python refuses to write out integers of thousands of digits
        return f"a huge {type(value).__name__}"


def plain(word: str) -> str:
    """Return a word that a user typed, escaped and shortened if it is long or not printable."""
    return word if word.isprintable() and len(word) <= 80 else shown(word)


def several(number: int, thing: str) -> str:
    """Return a number with a noun in singular or plural: `1 step`, `2 steps`, `1,000 steps`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def nearest(value: int, divisor: int) -> str:
    """Return the hint "use A or B" with the multiples of `divisor` below and above `value`."""
    below, above = value // divisor * divisor, (value // divisor + 1) * divisor
    return f"use {above}" if below == 0 else f"use {below} or {above}"


def indivisible(option: str, value: int, by: str, divisor: int) -> str:
    """Return the error message for an option's value that must be a multiple of another option's value."""
    return f"{option} {value} is not divisible by {by} {divisor}: {nearest(value, divisor)}"


def no_divisor(option: str, value: int, whole: str, total: int) -> str:
    """Return the error message for an option's value that must divide `total`; `whole` names the total in words."""
    return f"{option} {value} does not divide {whole}: set it to {divisors(total)}"


def divisors(value: int) -> str:
    """Return the divisors of a number, largest first, as "8, 4, 2 or 1"."""
    found = [str(divisor) for divisor in range(min(value, _LARGEST), 0, -1) if value % divisor == 0]
    return f"{', '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else found[0]


def aligned(rows: Sequence[Sequence[str]], *, left: Container[int] = ()) -> list[str]:
    """Return the lines of a text table. Columns are as wide as their longest cell, right-aligned unless in `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = (cell.ljust(width) if place in left else cell.rjust(width) for place, (cell, width) in pairs)
        lines.append("  ".join(cells).rstrip())
    return lines


def described(error: BaseException) -> str:
    """Return one line with an exception's type, its message, and the line of the user's file that raised it."""
    own = Path(__file__).parents[1]  # of this library: a user looks for a line of theirs
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    frames = [frame for frame in frames if own not in Path(frame.filename).parents]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return re.sub(r"\s+", " ", f"{type(error).__name__}{where}: {error}").strip()
