"""Convert energon's state to data that JSON can hold, and back, without running code from a checkpoint.

The state is nested dicts, lists and tuples of numbers and strings, with bytes and a few dataclasses in between.
A value that JSON does not have becomes `{"<kind>": …}`; only the dataclasses that the caller names are created again.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def to_plain(value: Any) -> Any:
    """Return `value` in JSON types. Raises TypeError for a type that energon's state is not known to hold."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case list():
            return [to_plain(item) for item in value]
        case tuple():
            return {"tuple": [to_plain(item) for item in value]}
        case dict():
            kind = "dict" if type(value) is dict else type(value).__name__
            return {kind: [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    if is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}}
    raise TypeError(f"no plain form of {type(value).__name__}")


def from_plain(value: Any, classes: Mapping[str, type]) -> Any:
    """Return the value that `to_plain` converted; `classes` are the dataclasses that may be created, by name.

    Raises ValueError for data that `to_plain` does not write, or for another class.
    """
    if isinstance(value, list):
        return [from_plain(item, classes) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"not a stored value: fields {sorted(map(str, value))}")
    [(kind, content)] = value.items()
    match kind, content:
        case "bytes", str():
            return base64.b64decode(content)
        case "tuple", list():
            return tuple(from_plain(item, classes) for item in content)
        case "dict", list():
            return {from_plain(key, classes): from_plain(item, classes) for key, item in content}
    made = classes.get(kind)
    if made is not None and isinstance(content, dict):
        return made(**{name: from_plain(item, classes) for name, item in content.items()})
    if made is not None and isinstance(content, list):  # a subclass of dict
        return made({from_plain(key, classes): from_plain(item, classes) for key, item in content})
    raise ValueError(f"a stored value of the unknown kind {kind!r}")
