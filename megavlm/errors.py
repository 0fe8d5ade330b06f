"""The exceptions whose message is shown to the user."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in the configuration or data. The message is one line that names the option and the remedy; the exit
    status is 2."""


class Stopped(Exception):
    """A run that ended before its last iteration because it was asked to. The message says by what; the exit status is
    75, and the same command continues the run."""
