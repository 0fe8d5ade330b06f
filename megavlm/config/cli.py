"""The command line: one flag per field of the schema, over a recipe or a YAML file.

argparse only splits the words; what they mean is `Kind.from_words`'s to say, so that every mistake is a UserError of
one line that the entry point prints once. (tyro was considered: its boxed messages, once per rank, are unreadable.)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from megavlm.config.effects import without_idle
from megavlm.config.fields import Kind, Option, options, with_values
from megavlm.config.load import from_yaml_file, to_yaml
from megavlm.config.run_length import run_of
from megavlm.config.schema import Config
from megavlm.config.words import did_you_mean, plain, renamed
from megavlm.errors import UserError
from megavlm.recipes import RECIPES, recipe

# Flags that are no field of the configuration.
RUN_FLAGS = ("--help", "--recipe", "--config", "--print-config")

_METAVARS = {int: "N", float: "X", str: "TEXT"}


def parse(argv: Sequence[str]) -> Config:
    """The configuration that a command line asks for.

    A recipe, a YAML file or the defaults come first and each flag given overrides them; of a flag given twice, the
    last counts. What a recipe says of schedules and of options without effect gives way to the flags. Raises UserError
    for anything wrong. `--help` and `--print-config` print and exit with 0.
    """
    parser = _parser()
    try:
        given, rest = parser.parse_known_args(_with_joined_negatives(argv))
    except argparse.ArgumentError as error:
        raise UserError(_described(error)) from None
    if rest:
        raise UserError(_unexpected(rest))
    if given.recipe is not None and given.config is not None:
        raise UserError("--recipe and --config exclude each other: keep one of them, flags override either")
    given_values = vars(given)
    values = {option.path: given_values[option.key] for option in options() if option.key in given_values}
    if given.recipe is not None:
        config = without_idle(run_of(recipe(given.recipe), values), values)
    else:
        config = with_values(from_yaml_file(given.config) if given.config is not None else Config(), values)
    if given.print_config:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake raises instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(" ".join(message.removeprefix("argument ").split()))


class _Store(argparse.Action):
    """Converts the words after a flag, whatever their number, and keeps the value under the option's key."""

    def __init__(self, *, option: Option, **settings: Any) -> None:
        super().__init__(**settings)
        self._option = option

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = option_string or self._option.flag
        setattr(namespace, self.dest, self._converted(values, name=name))

    def _converted(self, values: Any, *, name: str) -> Any:
        kind = self._option.kind
        if kind.scalar is not bool:
            return kind.from_words(values if isinstance(values, list) else [values], name=name)
        if not values:
            return name not in self._option.negations
        if values == "none":
            return None
        raise UserError(f"{name} takes no value but none, got {plain(values)}: write {name} or --no-{name[2:]}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        usage="%(prog)s [--recipe NAME | --config FILE.yaml] [--FLAG [VALUE ...]] ...",
        description="Train a vision-language model. Flags override the recipe or file, which overrides the defaults.",
        epilog=f"recipes: {', '.join(RECIPES)}. Of a flag given twice the last counts.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34),
        allow_abbrev=False,
        exit_on_error=False,
    )
    run = parser.add_argument_group("run")
    run.add_argument("--recipe", metavar="NAME", help=f"Begin with a named run: {', '.join(RECIPES)}.")
    run.add_argument("--config", metavar="FILE.yaml", help="Begin with a file, as --print-config writes it.")
    run.add_argument("--print-config", action="store_true", help="Print the resolved configuration as YAML and stop.")
    groups: dict[str, Any] = {}
    for option in options():
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(option.section)
        _add(groups[option.section], option)
    return parser


def _add(group: Any, option: Option) -> None:
    """Declare an option's flags; only those that were given show up in what argparse returns."""
    kind = option.kind
    settings = {"action": _Store, "option": option, "dest": option.key, "default": argparse.SUPPRESS}
    help = f"{option.help}{_default(option)}".replace("%", "%%")
    if kind.scalar is not bool:
        nargs = "*" if kind.many else None
        group.add_argument(*option.flags, nargs=nargs, metavar=_metavar(kind), help=help, **settings)
    elif kind.optional:
        group.add_argument(*option.flags, nargs="?", metavar="none", help=help, **settings)
        group.add_argument(*option.negations, nargs=0, help="The opposite.", **settings)
    else:
        group.add_argument(*option.flags, *option.negations, nargs=0, help=help, **settings)


def _metavar(kind: Kind) -> str:
    what = f"{{{','.join(kind.choices)}}}" if kind.choices else _METAVARS.get(kind.scalar, "PATH[,KEY=VALUE…]")
    return f"{what}|none" if kind.optional else what


def _default(option: Option) -> str:
    """A default as one would type it; none at all where the help line already says what `none` stands for."""
    value = option.default
    if value is None and "default:" in option.help:
        return ""
    if isinstance(value, bool):
        text = "on" if value else "off"
    elif isinstance(value, tuple):
        text = " ".join(map(str, value)) or "empty"
    else:
        text = "none" if value is None else str(value)
    return f" (default: {text})"


def _with_joined_negatives(argv: Sequence[str]) -> list[str]:
    """`--lr -1e-4` as `--lr=-1e-4`: argparse knows -1 and -0.5 for numbers, but takes other spellings for flags."""
    words: list[str] = []
    for word in argv:
        if words and words[-1].startswith("--") and "=" not in words[-1] and _is_odd_negative(word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _is_odd_negative(word: str) -> bool:
    if not word.startswith("-") or word[1:].isdigit():
        return False
    try:
        float(word)
    except ValueError:
        return False
    return True


def _described(error: argparse.ArgumentError) -> str:
    """argparse's complaint about one flag, which is that it has too few values or too many, in our words."""
    names = (error.argument_name or "").split("/")
    for option in options():
        if option.flag in names and option.kind.scalar is bool:
            return f"{option.flag} takes no value: write {option.flag} or {option.negations[0]}"
        if option.flag in names:
            return f"{'/'.join(option.flags)} expects {option.kind.expected}, but no value follows it"
    return f"{names[0]}: {error.message}"


def _unexpected(rest: Sequence[str]) -> str:
    """The message for words that belong to no flag."""
    flags = [word for word in rest if word.lstrip("-")[:1].isalpha() and word.startswith("-")]
    if not flags:
        return f"unexpected argument {plain(rest[0])}: write values right after their --flag"
    word = flags[0].partition("=")[0]
    known = [*RUN_FLAGS, *(flag for option in options() for flag in (*option.flags, *option.negations))]
    return f"unknown option {plain(word)}{renamed(word) or did_you_mean(word, known) or ': --help lists them all'}"
