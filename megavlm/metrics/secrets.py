"""Remove passwords, keys and signatures from data that a run prints or sends to trackers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# Names of settings and environment variables whose values are secret. `image_token` is a number, and no secret; each
# variable with such a name in capitals is one.
_NAME = re.compile(
    r"(?i)(?:password|passwd|secret|credentials?|api_?key|(?:access|private|account|secret|storage)_?key"
    r"|(?:auth|access|session|security|bearer|identity|hub|hf|sas)_?token|^token|(?-i:[A-Z0-9]_TOKEN)"
    r"|connection_?string)$"
)
_USER = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/@\s]+@")  # user:password@ in a URL
_QUERY = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^?#\s]*)[?#][^\s,]+")  # signatures are in a URL's query
_LEAST = 8  # characters: shorter values of environment variables may be ordinary words


def without_secrets(value: Any) -> Any:
    """Return plain data (mappings, lists, texts, numbers) in which secrets are replaced by ***.

    Secrets are the values of keys with names such as `password` or `api_key`, the user and the query of URLs, and the
    values of environment variables with such names, anywhere in a text.
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
    """Return the values of environment variables with names of secrets, the longest first."""
    found = {value for name, value in environment.items() if _NAME.search(name) and len(value) >= _LEAST}
    return tuple(sorted(found, key=len, reverse=True))
