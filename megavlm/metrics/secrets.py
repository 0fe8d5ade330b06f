"""Leave passwords, keys and signatures out of what a run tells others."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# Of a setting or an environment variable whose value must not be told. `image_token` is a number, and no secret.
_NAME = re.compile(
    r"(?i)(?:password|passwd|secret|credentials?|api_?key|(?:access|private|account|secret)_?key"
    r"|(?:auth|access|session|security|bearer|identity|hub|hf|sas)_?token|^token)$"
)
_USER = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/@\s]+@")  # user:password@ of a URL
_QUERY = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^?#\s]*)[?#][^\s,]+")  # signatures are in a URL's query
_LEAST = 8  # characters: shorter values of the environment may be words that mean something else


def without_secrets(value: Any) -> Any:
    """Return plain data (mappings, lists, texts, numbers) in which secrets are replaced by ***.

    A secret is the value of a key that is named like one, the user and the query of a URL, and the value of an
    environment variable that is named like one, wherever it stands.
    """
    return _cleaned(value, _of_environment(os.environ))


def _cleaned(value: Any, known: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        hidden = {key for key, each in value.items() if each and _NAME.search(str(key))}
        return {key: HIDDEN if key in hidden else _cleaned(each, known) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(each, known) for each in value]
    if not isinstance(value, str):
        return value
    for secret in known:
        value = value.replace(secret, HIDDEN)
    return _QUERY.sub(rf"\1?{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", value))


def _of_environment(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of variables that are named like secrets, the longest first."""
    found = {value for name, value in environment.items() if _NAME.search(name) and len(value) >= _LEAST}
    return tuple(sorted(found, key=len, reverse=True))
