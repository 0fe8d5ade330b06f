"""What megavlm takes for granted in megatron-core and in torch's private parts: name, arguments, and why it is used.

Another version that moves one of them fails here, in one line, before it fails in a run.
"""

from __future__ import annotations

import ast
import csv
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NEED_TRANSFORMER_ENGINE = {("megatron.core.fp8_utils", "get_fp8_recipe")}  # defined only where it is installed


@dataclass(frozen=True)
class Hook:
    """A line of contract.tsv: `name` of `module`, which takes at least `arguments`."""

    module: str
    name: str
    why: str
    arguments: tuple[str, ...] = ()


HOOKS = [
    Hook(module, name, why, tuple(arguments.split()))
    for module, name, arguments, why in csv.reader(
        (Path(__file__).parent / "contract.tsv").read_text().splitlines()[1:], delimiter="\t"
    )
]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.module}.{hook.name}")
def test_it_is_there_and_takes_what_we_give(hook: Hook) -> None:
    found: Any = importlib.import_module(hook.module)
    for step in hook.name.split("."):
        assert hasattr(found, step), f"{hook.module}.{hook.name} is gone ({hook.why})"
        found = getattr(found, step)
    if hook.arguments:
        taken = inspect.signature(found).parameters
        assert set(hook.arguments) <= set(taken), f"{hook.name} takes {', '.join(taken)} ({hook.why})"


SOURCES = {path: ast.parse(path.read_text()) for path in (Path(__file__).parents[3] / "megavlm").rglob("*.py")}


def test_every_private_name_of_torch_and_megatron_core_is_in_the_table() -> None:
    known = {f"{hook.module}.{hook.name}" for hook in HOOKS}
    used = {(path.name, name) for path, tree in SOURCES.items() for name in _private_names(tree)}
    assert len(used) > 10
    assert not {(path, name) for path, name in used if name not in known}


def _private_names(tree: ast.AST) -> Iterator[str]:
    """Names that a module imports, or reads from a module that it imports, with an underscore in front of a part."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "megatron"):
            for alias in node.names:
                modules[alias.asname or alias.name] = name = f"{node.module}.{alias.name}"
                if "._" in name:
                    yield name
        elif isinstance(node, ast.Import):
            modules |= {alias.name: alias.name for alias in node.names if alias.name == "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
            base, _, rest = ast.unparse(node.value).partition(".")
            if base in modules:
                yield ".".join(filter(None, (modules[base], rest, node.attr)))


def test_every_name_that_is_imported_from_megatron_core_is_there() -> None:
    """Public names: a version that moved one would only be refused where its module is imported."""
    found = {
        (node.module, alias.name)
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core")
        for alias in node.names
    }
    assert len(found) > 40
    for module, name in sorted(found - NEED_TRANSFORMER_ENGINE):
        there = importlib.import_module(module)
        assert hasattr(there, name) or importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name} is gone"
