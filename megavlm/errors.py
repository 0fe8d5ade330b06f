"""The exceptions whose message is shown to the user."""

from __future__ import annotations

import re


def one_line(text: str) -> str:
    """Return a text as one line that a terminal shows and does not obey: names from elsewhere may hold line breaks and
    codes that clear the screen or set its title.
    """
    line = " ".join(text.splitlines())
    return line if line.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


class UserError(ValueError):
    """A mistake in the configuration or data. The message is one line that names the option and the remedy, or a list
    with lines that are indented; the exit status is 2."""

    def __init__(self, message: object) -> None:
        super().__init__("\n".join(map(one_line, re.split(r"\n(?=  )", str(message)))))

    status = 2
    # Seconds that a rank of several waits before it ends. torchrun kills the others as soon as one ends: slower ranks
    # get here meanwhile, so that the one that prints the line does so and each ends with its own status.
    wait = 4.0


class RankError(UserError):
    """A mistake that one rank finds alone, so that it is reported whatever the number of the rank."""


class RanksMissing(RankError):
    """Ranks did not find one another in time: another attempt may succeed, so the exit status is 1."""

    status = 1


class BadNumbers(UserError):
    """Losses or gradients that are not finite, or spikes, ended the run. The exit status is 3."""

    status = 3


class DeviceFault(BadNumbers):
    """Numbers that must be equal are not: a device computes or stores wrongly. The exit status is 71."""

    status = 71


class StoreLost(UserError):
    """An object store did not answer, or not as it should: another attempt may succeed, so the exit status is 1."""

    status = 1


class ScratchLost(UserError):
    """A disk that holds a running step's state failed or is full. The exit status is 1: checkpoints are whole."""

    status = 1


class Stopped(Exception):
    """A run that ended before its last iteration because it was asked to. The message says by what; the exit status is
    75, and the same command continues the run."""
