"""Options by their keys on the command line: `--set SECTION.KEY=VALUE`, whose value is YAML.

All options have a key. Those that describe the shape of a model, and those that few runs change, have no flag beside.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from megavlm.config.fields import Option, options
from megavlm.config.messages import plain
from megavlm.errors import UserError

SET = "--set"


def assigned(word: str) -> Mapping[tuple[str, ...], Any]:
    """Return the values by path that a word after `--set` assigns. Raises UserError for every mistake in it."""
    from megavlm.config.load import data_of, values_in  # they import YAML, which most command lines do not need

    key, equals, text = word.partition("=")
    if not equals:
        raise UserError(f"{SET} {plain(word)} names no value: write {SET} {plain(key)}=VALUE")
    if not text.strip():
        raise UserError(f"{SET} {plain(word)} has an empty value: write null for none, '' for an empty text")
    data = data_of(text, what=f"{SET} {plain(key)}")
    for name in reversed(key.split(".")):
        data = {name: data}
    try:
        values = values_in(data)
    except UserError as error:
        raise UserError(f"{SET}: {error}") from None
    if ("run", "extension") in values:
        raise UserError(f"{SET} {plain(key)} comes too late for an extension: name it with --extension")
    return values


def keys_by_flag() -> dict[str, tuple[Option, bool]]:
    """Return the options without a flag by the flags that would follow from their paths, and whether one says "no"."""
    found = {}
    for option in options():
        if not option.flag:
            found[option.spelled] = (option, False)
            if option.kind.scalar is bool:
                found[f"--no-{option.spelled[2:]}"] = (option, True)
    return found


def as_set(option: Option, negated: bool, words: Sequence[str]) -> str:
    """Return how `--set` says what these words after a flag would say; a value that is not there is the user's."""
    if option.kind.scalar is bool:
        text = "null" if words[:1] == ["none"] else "false" if negated or words[:1] == ["false"] else "true"
    elif option.kind.optional and words[:1] == ["none"]:
        text = "null"
    elif option.kind.many:
        text = f"[{', '.join(words)}]"
    else:
        text = words[0] if words else "VALUE"
    return f"{SET} {shlex.quote(f'{option.key}={text}')}"
