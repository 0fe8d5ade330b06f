"""Refuse energon meta-datasets whose YAML files would run code.

energon instantiates any Python class that a YAML file names, and calls functions of files beside the data. Data must
not run code, so its YAML files may only name the classes that read tars as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.energon.dataset_config import load_yaml
from megatron.energon.epathlib import EPath

from megavlm.data.records.prepared import check_prepared

_MODULE = "megatron.energon"
_CLASSES = ("Metadataset", "MetadatasetV2", "CrudeWebdataset")
_CODE = ("__function__", "joiner", "sample_loader")
_AUX = "aux"  # auxiliary data for user code that looks samples up, which is refused
_META = ".nv-meta"


def check_yaml(path: EPath) -> None:
    """Raise ValueError if the meta-dataset `path`, or a data set in it, would run more than energon's own readers."""
    _check(path, seen=set())


def _check(path: EPath, seen: set[str]) -> None:
    if str(path) in seen:
        return
    seen.add(str(path))
    with path.open("rb") as file:
        content = load_yaml(file)
    _check_node(content, path, seen)


def _check_node(node: Any, path: EPath, seen: set[str]) -> None:
    if isinstance(node, list):
        for item in node:
            _check_node(item, path, seen)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        _check_node(value, path, seen)
        refused = (
            key in (*_CODE, _AUX)
            or (key == "part_filter" and isinstance(value, str))
            or (key == "__module__" and value != _MODULE)
            or (key == "__class__" and value not in _CLASSES)
        )
        if refused:
            raise ValueError(
                f"{path} has {key}: {value}, and only {', '.join(_CLASSES)} are read, which run no code out of the data"
            )
        if key == "path" and isinstance(value, str):
            _check_reference(EPath(value) if "://" in value else path.parent / value, node, seen)


def _check_reference(path: EPath, node: dict[str, Any], seen: set[str]) -> None:
    if path.name.endswith((".yaml", ".yml")):
        _check(path, seen)
        return
    config = path / _META / str(node.get("dataset_config") or "dataset.yaml")
    if config.is_file():
        _check(config, seen)
    if path.is_local() and (path / _META).is_dir():
        check_prepared(Path(str(path)))
