"""What `--help`, `--help-all` and `--help-keys` print of options: names, values, a sentence and the default."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from megavlm.config.fields import Kind, Option, options

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
    """Return what stands for a value: {fp32,bf16}|none, N, PATH[,KEY=VALUE…]."""
    what = f"{{{','.join(kind.choices)}}}" if kind.choices else _METAVARS.get(kind.scalar, "PATH[,KEY=VALUE…]")
    return f"{what}|none" if kind.optional else what


def described(option: Option, *, on: str = "on", off: str = "off") -> str:
    """Return the sentence of an option with its default as a user would type it, unless it explains a missing one."""
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
    """Return lines with the keys of all options that have no flag, by section."""
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
