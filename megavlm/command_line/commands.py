"""Helpers of all commands: an argument parser, and one-line error messages with an exit status."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

from megavlm.config.messages import did_you_mean, plain
from megavlm.errors import UserError
from megavlm.program import started_as

Main = Callable[[Sequence[str]], int]


class _Help(argparse.HelpFormatter):
    """Help formatter that adds each option's default to its help text."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, argparse.SUPPRESS, (), []) or "efault:" in str(action.help):
            return action.help
        return f"{str(action.help).removesuffix('.')}; default: %(default)s."


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError for a mistake instead of printing the usage and exiting."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **more})
        self._negative_number_matcher = re.compile(r"-\.?\d.*")  # argparse's own takes -1e-4 for a flag

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.removeprefix("argument ").split())
        from megavlm.rules.fields import options

        if unknown := re.match(r"unrecognized arguments: (.*)", message):
            words = unknown[1].split()
            word = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
            hint = did_you_mean(word, _flags(self)) if word.startswith("-") else ""
            if any(word in (*option.flags, *option.negations) for option in options()):
                raise UserError(f"unknown option {plain(word)}, which megavlm train alone has: leave it out")
            message = f"{'unknown option' if word.startswith('-') else 'unexpected argument'} {plain(word)}{hint}"
        raise UserError(message if "did you mean" in message else f"{message}: see {self.prog} --help")


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags of a parser and of those of its commands."""
    below = [each for action in parser._actions if isinstance(action.choices, dict) for each in action.choices.values()]
    return [*parser._option_string_actions, *(flag for each in below for flag in _flags(each))]


def count(text: str) -> int:
    """Convert the word of an option to a whole number from 1; for argparse's `type`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{plain(text)} must be a whole number from 1")
    return int(text)


def progress(seconds: float = 2.0) -> Callable[[str], None]:
    """Return a function that prints a line to stderr, at most once in `seconds`; it drops the lines between."""
    last = time.monotonic()

    def say(line: str) -> None:
        nonlocal last
        if time.monotonic() - last > seconds:
            last = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    return say


def reported(command: str) -> Callable[[Main], Main]:
    """Return a decorator of a command's `main(argv)`: it prints a UserError in one line and returns the exit status."""

    def decorate(main: Main) -> Main:
        @wraps(main)
        def run(argv: Sequence[str]) -> int:
            try:
                return main(argv)
            except UserError as error:
                print(complaint(command, error, argv), file=sys.stderr)
                return error.status

        return run

    return decorate


def complaint(command: str, error: UserError, argv: Sequence[str]) -> str:
    """Return the line that reports an error, with the program's name and with options as the user typed them."""
    return f"{started_as(command)}: {as_typed(str(error), argv)}"


def as_typed(message: str, argv: Sequence[str]) -> str:
    """Return a message in which each option has the name that the user typed, which may be an alias (`--tp`)."""
    from megavlm.rules.fields import options

    typed = {word.partition("=")[0] for word in argv}
    for option in options():
        for first, *others in filter(None, (option.flags, option.negations)):
            for other in typed.intersection(others) if first not in typed else ():
                message = re.sub(rf"(?<![\w-]){first}(?![\w-])", other, message)
    return message
