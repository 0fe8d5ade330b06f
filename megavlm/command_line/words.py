"""Error messages with suggestions for unknown options and wrong values on a command line, and the values of `--set`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megavlm.config.messages import DASHES, did_you_mean, plain
from megavlm.errors import UserError
from megavlm.rules import elsewhere
from megavlm.rules.fields import options

SET = "--set"
# Flags that are not fields of the configuration.
RUN_FLAGS = ("--help", "--help-all", "--help-keys", "--recipe", "--config", "--print-config", SET)


def wrong_values(error: argparse.ArgumentError) -> str:
    """Return the error message for a flag with too few or too many values."""
    names = (error.argument_name or "").split("/")
    for option in options():
        if option.flag in names and option.kind.scalar is bool:
            return f"{option.flag} takes no value: write {option.flag} or {option.negations[0]}"
        if option.flag in names:
            return f"{'/'.join(option.flags)} expects {option.kind.expected}, but no value follows it"
    return f"{names[0]}: {error.message}"


def unexpected(rest: Sequence[str], argv: Sequence[str]) -> str:
    """Return the error message for words that belong to no known flag."""
    flags = [word for word in rest if word[:1] in DASHES and word.lstrip(DASHES)[:1].isalpha()]
    if not flags:
        if rest[0].endswith((".yaml", ".yml")):
            return f"unexpected argument {plain(rest[0])}: a file of options follows --config"
        before = [word for word in argv[: argv.index(rest[0])] if word.startswith("--")] if rest[0] in argv else []
        for option in options():
            if before and option.kind.scalar is bool and before[-1] in (*option.flags, *option.negations):
                hint = (
                    elsewhere.exact_hint(before[-1], written=str)
                    or f": write {option.flags[0]} or {option.negations[0]}"
                )
                return f"{before[-1]} takes no value, got {plain(rest[0])}{hint}"
        return f"unexpected argument {plain(rest[0])}: write values right after their --flag"
    word = flags[0].partition("=")[0]
    if re.search(r"\s", word):
        return f"{plain(word)} is one word: write the flag and its value as two, without quotes around both"
    keys = keys_by_flag()
    if word in keys:
        return f"unknown option {plain(word)}: it is a key: write {SET} {keys[word]}=VALUE"
    known = [*known_flags(), *keys]
    aside = [option.spelled for option in options() if option.registers or option.section == "model.audio"]
    hint = elsewhere.exact_hint(word, written=_as_typed) or did_you_mean(word, known, aside=aside, written=_as_typed)
    hint = hint or elsewhere.hint(word, written=_as_typed)
    return f"unknown option {plain(word)}{hint or ': --help-all lists all options'}"


def _as_typed(text: str) -> str:
    """Return a hint's option as a user would type it: `--set KEY=VALUE` for an option without a flag."""
    head, comma, note = text.partition(",")
    if key := keys_by_flag().get(head):
        return f"{SET} {key}=VALUE"
    return f"{head}=VALUE{comma}{note}" if head.startswith(SET) and "=" not in head else text


def assigned(word: str) -> Mapping[tuple[str, ...], Any]:
    """Return the values, by path, that a word after `--set` assigns. Raises UserError if the word is invalid."""
    from megavlm.rules.load import data_of, values_in  # they import YAML, which most command lines do not need

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


def known_flags() -> list[str]:
    """Return all flags of a run, with their aliases and negations."""
    return [*RUN_FLAGS, *(flag for option in options() for flag in (*option.flags, *option.negations))]


def keys_by_flag() -> dict[str, str]:
    """Map flags that do not exist to keys: for options without a flag, the flag that their path would give."""
    keys = [option for option in options() if not option.flag]
    negated = {f"--no-{option.spelled[2:]}": option.key for option in keys if option.kind.scalar is bool}
    return {option.spelled: option.key for option in keys} | negated
