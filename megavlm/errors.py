"""Define the exceptions that end a program with a message for the user and an exit status."""

from __future__ import annotations

import re


def one_line(text: str) -> str:
    """Return a text as one line without control characters: names from files or the network may hold line breaks and
    terminal codes that clear the screen or set its title.
    """
    line = " ".join(text.splitlines())
    return line if line.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


class UserError(ValueError):
    """A mistake in the configuration or data. The message is one line that names the option and the remedy, or a list
    with lines that are indented; the exit status is 2."""

    def __init__(self, message: object) -> None:
        super().__init__("\n".join(map(one_line, re.split(r"\n(?=  )", str(message)))))

    status = 2
    # Seconds that a rank of several waits before it exits. torchrun kills all ranks as soon as one exits: slower ranks
    # get here meanwhile, so that the printing rank prints its line and each rank exits with its own status.
    wait = 4.0


class RankError(UserError):
    """A mistake that only one rank finds; that rank reports it, whatever its number."""


class RanksMissing(RankError):
    """Rendezvous of the ranks timed out: another attempt may succeed, so the exit status is 1."""

    status = 1


class BadNumbers(UserError):
    """Losses or gradients that are not finite, or spikes, ended the run. The exit status is 3."""

    status = 3


class DeviceFault(BadNumbers):
    """Numbers that must be equal are not: a device computes or stores wrongly. The exit status is 71."""

    status = 71


class StoreLost(UserError):
    """An object store did not answer, or answered wrongly: another attempt may succeed, so the exit status is 1."""

    status = 1


class ScratchLost(UserError):
    """A disk that holds a running step's state failed or is full. The exit status is 1; checkpoints are intact."""

    status = 1


class Stopped(Exception):
    """A run that ended before its last iteration because of a stop request. The message names its source; the exit
    status is 75, and the same command continues the run."""
