"""Load the extensions that a user names with `--extension my_package`: their code runs with the user's rights.

Extensions are named on the command line or in its file of options, never loaded by a checkpoint. A checkpoint only
lists the extensions that it was made with, and the user names them again.
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
    """Split a command line into the values of a flag, which may occur repeatedly, and all other words. It works before
    other flags are known.
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
    """Load the extensions that a command line names and return its other words, for programs with their own flags.

    Raises UserError.
    """
    names, rest = split_words(FLAG, argv)
    load_extensions(names)
    return rest


def load_extensions(names: Iterable[str]) -> None:
    """Import extensions and register their entries; extensions that are registered already are skipped.
    Raises UserError, in one line, for an extension that cannot be imported or whose names are taken.
    """
    for name in names:
        if name not in registry():
            _register(name, imported(name))


def extensions_of(config: Config) -> tuple[str, ...]:
    """Return the user's extensions whose registered names a configuration uses, and which it therefore needs."""
    owners = [
        registry().owner_of(option.point, name)
        for option in options()
        if option.point is not None
        for value in (value_at(config, option.path),)
        for name in (value if option.kind.many else (value,))
    ]
    return tuple(dict.fromkeys(owner for owner in owners if owner is not None))


def missing_extensions(made_with: object) -> str | None:
    """Return the `--extension` words to add so that all `made_with` extensions are loaded; None if they are.

    `made_with` is a list of names as read from a file, and may be of any type.
    """
    names = [str(each) for each in made_with] if isinstance(made_with, list) else []
    lacking = [plain(name) for name in names if name not in registry()]
    return f"{FLAG} {' '.join(lacking)}" if lacking else None


def _register(name: str, extension: Extension) -> None:
    """Register an extension under `name`. Raises UserError if one of its names or flags is taken."""
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
