"""The one exception that a user is meant to read."""

from __future__ import annotations


class UserError(ValueError):
    """The user's configuration or data is wrong: one line that names the option and what to change (exit status 2)."""
