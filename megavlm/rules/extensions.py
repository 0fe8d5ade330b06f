"""Load the extensions that a user names with `--extension my_package`: their own code, with their rights.

Code comes from the command line and from a file of options that it names, never from a checkpoint: this says which
extensions it was made with, and the user names them again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from megavlm.config.messages import described, plain
from megavlm.config.registry import FLAG, OPEN_POINTS, POINTS, Extension, imported, registry
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.rules.fields import options, value_at

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def split_words(flag: str, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line that follow a flag, wherever it occurs, and all others. Other flags may not be
    known yet.
    """
    following, rest, inside = list[str](), list[str](), False
    for word in argv:
        inside = word == flag or (inside and not word.startswith("-"))
        if word.startswith(f"{flag}="):
            following.append(word.partition("=")[2])
        elif word != flag:
            (following if inside else rest).append(word)
    return following, rest


def without_extensions(argv: Sequence[str]) -> list[str]:
    """Load the extensions that a command line names, and return its other words: for programs with flags of their own.

    Raises UserError.
    """
    names, rest = split_words(FLAG, argv)
    load_extensions(names)
    return rest


def load_extensions(names: Iterable[str]) -> None:
    """Import extensions and register what they add; one that is there stays as it is.

    Raises UserError, in one line, for an extension that cannot be imported or whose names are taken.
    """
    for name in names:
        if name not in registry():
            _register(name, imported(name))


def extensions_of(config: Config) -> tuple[str, ...]:
    """Return the user's extensions that own a name in a configuration: without them, it means nothing."""
    owners = [
        registry().owner_of(option.point, name)
        for option in options()
        if option.point is not None
        for value in (value_at(config, option.path),)
        for name in (value if option.kind.many else (value,))
    ]
    return tuple(dict.fromkeys(owner for owner in owners if owner is not None))


def missing_extensions(made_with: object) -> str | None:
    """Return what to add to the command line for something that was made with these extensions; None if all are there.

    `made_with` comes from a file.
    """
    names = [str(each) for each in made_with] if isinstance(made_with, list) else []
    lacking = [plain(name) for name in names if name not in registry()]
    return f"{FLAG} {' '.join(lacking)}" if lacking else None


def _register(name: str, extension: Extension) -> None:
    """Add what an extension declares. Raises UserError if a name or a flag of it is taken."""
    for point in POINTS:
        choices = (word for each in options() if each.point == point for word in each.kind.choices)
        taken = {*registry().at(point), *choices, *OPEN_POINTS.get(point, ())}
        for each in getattr(extension, point):
            if not _NAME.fullmatch(each.name) or hasattr(dict, each.name):
                raise UserError(
                    f"{FLAG} {plain(name)}: {plain(each.name)} cannot be among its {point}: call it by another word "
                    "of small letters, digits and _"
                )
            if each.name in taken:
                owner = registry().owner_of(point, each.name)
                whose = "megavlm" if owner is None else f"{FLAG} {plain(owner)}"
                raise UserError(f"{FLAG} {plain(name)}: {whose} has {each.name} among its {point} already: rename one")
            taken.add(each.name)
    registry()[name] = extension
    try:
        flags = Counter(flag for option in options() for flag in (*option.flags, *option.negations))
        problem = next((f"another option is {flag} already: rename it" for flag, n in flags.items() if n > 1), None)
    except Exception as error:  # a section that is no dataclass of options, of whatever kind
        problem = f"its options cannot be read: {described(error)}"
    if problem is not None:
        del registry()[name]
        raise UserError(f"{FLAG} {plain(name)}: {problem}")
