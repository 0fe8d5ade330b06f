"""The exception whose message is shown to the user."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in the configuration or data. The message is one line that names the option and the remedy; the exit
    status is 2."""
