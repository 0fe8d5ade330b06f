"""Read what energon reads and stores without running code: YAML files of meta-datasets, and positions in checkpoints.

energon instantiates any Python class that a YAML file names, and calls functions of files beside the data. Data must
not run code, so its YAML files may only name the classes that read tars as they are.

energon's position is nested dicts, lists and tuples of numbers and strings, with bytes and a few dataclasses in
between. In JSON, a value that JSON does not have is `{"<kind>": …}`; only the dataclasses that the caller names are
created again.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from megatron.energon.dataset_config import load_yaml
from megatron.energon.epathlib import EPath

_MODULE = "megatron.energon"
_CLASSES = ("Metadataset", "MetadatasetV2", "CrudeWebdataset")
# The last is auxiliary data for user code that looks samples up.
_CODE = ("__function__", "joiner", "sample_loader", "aux")


def check_yaml(path: EPath, seen: set[str]) -> None:
    """Raise ValueError if the meta-dataset `path`, or a data set in it, would run more than energon's own readers.

    `seen` are the files that have been checked.
    """
    if str(path) in seen:
        return
    seen.add(str(path))
    with path.open("rb") as file:
        waiting = [load_yaml(file)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        if not isinstance(node, dict):
            continue
        for key, value in node.items():
            waiting.append(value)
            refused = (
                key in _CODE
                or (key == "part_filter" and isinstance(value, str))
                or (key == "__module__" and value != _MODULE)
                or (key == "__class__" and value not in _CLASSES)
            )
            if refused:
                raise ValueError(
                    f"{path} has {key}: {value}, and only {', '.join(_CLASSES)} are read, which run no code out of the "
                    "data"
                )
            if key == "path" and isinstance(value, str):
                place = EPath(value) if "://" in value else path.parent / value
                if not place.name.endswith((".yaml", ".yml")):
                    place = place / ".nv-meta" / str(node.get("dataset_config") or "dataset.yaml")
                    if not place.is_file():
                        continue
                check_yaml(place, seen)


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
