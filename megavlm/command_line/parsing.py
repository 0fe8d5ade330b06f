"""Parse the command line of a run: flags for most options, `--set` for all; both override a recipe or a YAML file.

argparse splits the command line into flags and words. `Kind.from_words` converts the words, so that every error is a
UserError of one line, which the entry point prints once. (tyro prints boxed messages once per rank instead.)
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from megavlm.command_line.commands import Parser
from megavlm.command_line.words import assigned, unexpected, wrong_values
from megavlm.config.messages import did_you_mean, plain
from megavlm.config.option import COMMON_GROUPS
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.rules.check import idle, options_have_an_effect, without_idle
from megavlm.rules.extensions import load_extensions, split_words
from megavlm.rules.fields import Kind, Option, options, with_values


def parse(argv: Sequence[str], *, complete: Callable[[Config], Config] | None = None) -> Config:
    """Return the configuration that a command line describes.

    Flags and `--set` override a recipe or a YAML file, which overrides the defaults; the last value of an option wins,
    except that `--datasets` add up. A recipe's schedules are scaled to `--train-iters`. A recipe's options without
    effect are reset to their defaults, and so are those of a file that lose their effect by the flags. Raises UserError
    for every error. `--help`, `--help-all`, `--help-keys` and `--print-config` print and exit with status 0.

    `complete` returns a configuration with the model of its Hugging Face folder, for `--print-config`. A caller that
    passes it uses the whole configuration, so a flag without effect is refused even at its default.
    """
    extensions = (*_of_file(argv), *split_words("--extension", argv)[0])  # first: they decide which flags there are
    load_extensions(extensions)
    parser = _parser(all_options=True)
    try:
        given, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(wrong_values(error)) from None
    if rest:
        raise UserError(unexpected(rest, argv))
    if given.config == "":
        raise UserError("--config is empty: name a file, or leave it out")
    if given.recipe is not None and given.config is not None:
        raise UserError("--recipe and --config cannot be combined: keep one of them; flags override either")
    given_values = vars(given)
    values = {option.path: given_values[option.key] for option in options() if option.key in given_values}
    values = _without_others(values) | ({("run", "extension"): tuple(dict.fromkeys(extensions))} if extensions else {})
    if given.recipe is not None:
        base = recipe(given.recipe, train_iters=values.get(("train", "train_iters")))
        config = without_idle(_with_sizes(base, values), values)
    else:
        base = _with_sizes(Config(), _in_file(given.config)) if given.config is not None else Config()
        config = without_idle(_with_sizes(base, values), {*values, *(option.path for option, _ in idle(base))})
    if given.print_config:
        from megavlm.rules.load import to_yaml  # here and below: YAML is imported only where it is used

        print(to_yaml(complete(config) if complete else config), end="")
        raise SystemExit(0)
    # A repeated flag may reset an earlier one to its default: scripts end with "$@".
    typed = {path for path, times in typed_options(argv).items() if times == 1}
    # Some options have an effect only with certain models; the model is read only if an option seems to have none.
    asks = any(True for _ in idle(config, typed=typed))
    if complete and asks and (complaint := next(options_have_an_effect(complete(config), typed=typed), None)):
        raise UserError(complaint)
    return config


def typed_options(argv: Sequence[str]) -> dict[tuple[str, ...], int]:
    """Return how often a command line names each option, by flag or key, by the paths of those that it names."""
    words = Counter(word.partition("=")[0] for word in argv)
    names = {option.path: (option.key, *option.flags, *option.negations) for option in options()}
    counts = ((path, sum(words[each] for each in spellings)) for path, spellings in names.items())
    return {path: count for path, count in counts if count}


# Pairs of options that set the same length: a flag for one replaces the other in a recipe or file.
_EITHER_OR = (
    (("train", "epochs"), ("train", "train_iters")),
    (("optimizer", "lr_warmup_fraction"), ("optimizer", "lr_warmup_iters")),
)


def _without_others(values: dict[tuple[str, ...], Any]) -> dict[tuple[str, ...], Any]:
    """Return the values of flags; if one option of a pair in `_EITHER_OR` is set, also the other's default."""
    defaults = {option.path: option.default for option in options()}
    pairs = [pair for either in _EITHER_OR for pair in (either, either[::-1])]
    return {other: defaults[other] for one, other in pairs if values.get(one) is not None} | values


def _of_file(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the extensions that the file of `--config` names."""
    if not (paths := split_words("--config", argv)[0]):
        return ()
    from megavlm.rules.load import extensions_in_file

    return extensions_in_file(paths[-1])


def _with_sizes(config: Config, values: Mapping[tuple[str, ...], Any]) -> Config:
    """Return the configuration with these values; the name of a published model also sets the model's sizes."""
    if config.model.published is None and ("model", "published") not in values:
        return with_values(config, values)
    from megavlm.families import with_published  # and all families, of which few command lines need one

    return with_published(config, values)


def _in_file(path: str) -> dict[tuple[str, ...], Any]:
    from megavlm.rules.load import values_in_file

    return values_in_file(path)


class _Help(argparse.Action):
    """Prints the common options (`--help`), all flags (`--help-all`) or options without flags (`--help-keys`), and
    exits.
    """

    def __call__(self, *_: Any) -> NoReturn:
        if self.const == "keys":
            print(key_table())
        else:
            _parser(all_options=self.const == "all").print_help()
        raise SystemExit(0)


class _Set(argparse.Action):
    """Stores the value of each `SECTION.KEY=VALUE` under the option's key, as the option's flag would."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        for word in values:
            for path, value in assigned(word).items():
                setattr(namespace, ".".join(path), value)


class _StoreOnce(argparse.Action):
    """Converts the words after a flag and stores the value under the option's key."""

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
        found = self._converted(values, name=name)
        if self._option.kind.is_record:  # data sets: nobody names one to drop another
            found = (*getattr(namespace, self.dest, ()), *found)
        setattr(namespace, self.dest, found)

    def _converted(self, values: Any, *, name: str) -> Any:
        kind = self._option.kind
        if kind.scalar is not bool:
            return kind.from_words(values if isinstance(values, list) else [values], name=name)
        if not values:
            return name not in self._option.negations
        if values == "none":
            return None
        raise UserError(f"{name} takes no value except none, got {plain(values)}: write {name} or --no-{name[2:]}")


def _parser(*, all_options: bool) -> argparse.ArgumentParser:
    """Return the parser of all options, grouped by section, or of the common ones, grouped by task (for `--help`)."""
    parser = Parser(
        usage="%(prog)s [--recipe NAME | --config FILE.yaml] [--FLAG VALUE ...]",
        description="Train a vision-language model. Flags override the recipe or file, which overrides the defaults; "
        f"the last of repeated flags wins, but --datasets add up. Recipes: {', '.join(RECIPES)}.",
        formatter_class=Formatter,
        allow_abbrev=False,
        exit_on_error=False,
        add_help=False,
    )
    run = parser.add_argument_group("run")
    for flags, listed, what in (
        (("-h", "--help"), "common", "Print the common options and exit."),
        (("--help-all",), "all", "Print all options that have flags and exit."),
        (("--help-keys",), "keys", "Print the keys of all other options (a model's shape) and exit."),
    ):
        run.add_argument(*flags, action=_Help, nargs=0, const=listed, help=what)
    run.add_argument("--recipe", metavar="NAME", help="Start from a predefined configuration.")
    run.add_argument("--config", metavar="FILE.yaml", help="Start from a configuration that --print-config wrote.")
    run.add_argument(
        "--set",
        action=_Set,
        nargs="+",
        metavar="KEY=VALUE",
        default=argparse.SUPPRESS,
        help="Set any option by its key in a file; VALUE is YAML.",
    )
    run.add_argument("--print-config", action="store_true", help="Print the configuration as YAML and exit.")
    titles = dict.fromkeys(option.section for option in options() if option.flag) if all_options else COMMON_GROUPS
    groups = {title: parser.add_argument_group(title) for title in titles}
    for option in options():
        if all_options and option.flag:
            _add(groups[option.section], option)
        elif not all_options and option.common is not None:
            _add(groups[option.common], option, briefly=True)
    return parser


def _add(group: Any, option: Option, *, briefly: bool = False) -> None:
    """Add an option's flags to a group of the parser, or if `briefly` only its shortest flag, for `--help`. Flags that
    the user does not give leave no value in the namespace.
    """
    flags, negations, kind = option.flags, option.negations, option.kind
    if briefly:
        flags, negations, kind = (min(flags, key=len),), (), replace(kind, optional=False)
    settings = {"action": _StoreOnce, "option": option, "dest": option.key, "default": argparse.SUPPRESS}
    help = described(option).replace("%", "%%")
    if kind.scalar is not bool:
        nargs = "*" if kind.many else None
        group.add_argument(*flags, nargs=nargs, metavar=metavar(kind), help=help, **settings)
    elif kind.optional:
        group.add_argument(*flags, nargs="?", metavar="none", help=help, **settings)
        group.add_argument(*negations, nargs=0, help=f"Opposite of {option.flag}.", **settings)
    else:
        group.add_argument(*flags, *negations, nargs=0, help=help, **settings)


_METAVARS = {int: "N", float: "X", str: "TEXT", bool: "BOOL", dict: "MAPPING"}


class Formatter(argparse.HelpFormatter):
    """Prints each option as a paragraph that begins with its flags, with one metavar after the last of them."""

    def _format_action(self, action: argparse.Action) -> str:
        names = self._format_action_invocation(action)
        return _paragraph(names, self._expand_help(action), self._width) + "\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        flags = ", ".join(action.option_strings)
        several = " ..." if action.nargs in ("*", "+") else ""
        return flags if action.nargs == 0 else f"{flags} {action.metavar}{several}"


def metavar(kind: Kind) -> str:
    """Return the placeholder of a value in help texts: {fp32,bf16}|none, N, PATH[,KEY=VALUE…]."""
    what = f"{{{','.join(kind.choices)}}}" if kind.choices else _METAVARS.get(kind.scalar, "PATH[,KEY=VALUE…]")
    return f"{what}|none" if kind.optional else what


def described(option: Option, *, on: str = "on", off: str = "off") -> str:
    """Return an option's help text with its default as a user would type it, unless the text explains the default."""
    value = option.default
    if value in (None, ()) and "default:" in option.help.lower():
        return option.help
    if isinstance(value, bool):
        text = on if value else off
    elif isinstance(value, tuple):
        text = " ".join(map(str, value)) or "empty"
    else:
        text = "none" if value is None else str(value)
    return f"{option.help} (default: {text or 'empty'})"


def key_table() -> str:
    """Return the text of `--help-keys`: the keys of all options without a flag, by section."""
    return "\n".join(_lines_of_keys(shutil.get_terminal_size().columns - 2))


def _lines_of_keys(width: int) -> Iterator[str]:
    yield from textwrap.wrap(
        "Options without a flag: lines of a file for --config, or words after --set, as --set "
        "model.language.num_layers=2 or --set 'model.vision.full_attention_layers=[1, 3]'. A model that is given with "
        "--init-from brings its shape.",
        width,
    )
    for section, found in groupby((option for option in options() if not option.flag), key=lambda each: each.section):
        yield f"\n{section}:"
        for option in found:
            what = metavar(replace(option.kind, optional=False))
            what = f"[{what}, …]" if option.kind.many else what
            name = f"{option.path[-1]}={what}{'|null' if option.kind.optional else ''}"
            yield _paragraph(name, described(option, on="true", off="false"), width)


def _paragraph(names: str, text: str, width: int) -> str:
    lines = textwrap.wrap(f"{names}  {text}", width - 2, subsequent_indent=" " * 4, break_on_hyphens=False)
    return textwrap.indent("\n".join(lines), "  ")


# Predefined configurations: files of options in `demos/`, as --config takes them, of which a later one overrides those
# before. The demos train a model that learns to read handwritten digits in a few minutes on two CPU cores.
RECIPES = {"demo": ("demo",), "demo-embed": ("demo", "demo-embed"), "demo-moe": ("demo", "demo-moe")}


def recipe(name: str, *, train_iters: int | None = None) -> Config:
    """Return the configuration of a recipe, with `train_iters` in place of its own length if given.

    Warm-up and decay are then scaled to the new length, rounded down. Raises UserError, with a suggestion, for an
    unknown name.
    """
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or f": choose one of {', '.join(RECIPES)}"
        raise UserError(f"unknown recipe {plain(name)}{hint}")
    from megavlm.rules.load import values_in_file  # YAML is imported only where it is used

    config = Config()
    for file in RECIPES[name]:
        config = with_values(config, values_in_file(Path(__file__).with_name("demos") / f"{file}.yaml"))
    if train_iters is None:
        return config
    # Options counted in iterations, with the lower bound of each.
    schedule = {
        option: max(least, length * train_iters // config.train.train_iters)
        for option, least in (("lr_warmup_iters", 0), ("lr_decay_iters", 1), ("lr_wsd_decay_iters", 1))
        if (length := getattr(config.optimizer, option)) is not None
    }
    return replace(config, optimizer=replace(config.optimizer, **schedule))
