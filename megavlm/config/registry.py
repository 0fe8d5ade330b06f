"""Registry of extensions: named connectors, data sources, callbacks and so on, with their options.

An extension is a value of type `Extension` that a package declares. This module holds the extensions of this process in
one table, which only grows, and is filled before it is read: `megavlm.arch` registers this package's own connectors,
which the configuration does not import, and `rules/extensions.py` registers the user's extensions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from megavlm.config.messages import described, did_you_mean, plain
from megavlm.errors import UserError

BUILT_IN = "megavlm"  # the name of the extension that this package registers itself
FLAG = "--extension"


@dataclass(frozen=True)
class Entry:
    """A registered object that is imported on first use, so that command lines are parsed without importing it.

    Args:
        name: the name by which options select it.
        code: its location, as "package.module:name".
        options: a frozen dataclass whose fields are all made with `option()`; None: it has no options.
    """

    name: str
    code: str
    options: type | None = None

    def load(self) -> Any:
        """Import and return the object of the entry."""
        return from_code(self.code)


@dataclass(frozen=True)
class ObjectiveEntry(Entry):
    """A loss of embeddings; `code` names a function like `megavlm.objective.losses.info_nce`.

    Args:
        learned: parameters of the loss that model.objective.learn_temperature trains: ("log_scale",), or none.
        counted: name in metrics of the units over which the loss is a mean.
    """

    learned: tuple[str, ...] = ()
    counted: str = "pairs"


def from_code(code: str) -> Any:
    """Import and return the object at "package.module:name"."""
    module, _, attribute = code.partition(":")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True)
class Extension:
    """Everything that a package registers.
    Args:
        connectors: kinds of projector (`megavlm.extension.Connector`), for --projector-kind.
        inputs: conversions of image files to a model's input (`megavlm.inputs.vision_inputs.VisionInput`), for
            --vision-input. The function is sent to processes that decode images, so a module must name it.
        objectives: losses of embeddings over the global batch (`ObjectiveEntry`), for --objective.
        sources: sources of samples, for --data.
        callbacks: classes of callbacks, for --callback.
        families: architectures of Hugging Face Transformers (`megavlm.families.shared.family.Family`).
    """

    connectors: tuple[Any, ...] = ()
    inputs: tuple[Entry, ...] = ()
    objectives: tuple[ObjectiveEntry, ...] = ()
    sources: tuple[Entry, ...] = ()
    callbacks: tuple[Entry, ...] = ()
    families: tuple[Entry, ...] = ()


POINTS = tuple(field.name for field in fields(Extension))
OPEN_POINTS = {"callbacks": (), "inputs": ("rgb", "array")}  # points whose options accept other values too, as these


State = tuple[tuple[str, Extension], ...]


class Registry(dict[str, Extension]):
    """The extensions of a process, by the names with which they were requested."""

    @property
    def state(self) -> State:
        """Return all registered extensions as a hashable value, which can be the key of a cache."""
        return tuple(self.items())

    def at(self, point: str) -> dict[str, Any]:
        """Return the entries of all extensions at a point, by name."""
        return {each.name: each for found in self.values() for each in getattr(found, point)}

    def owner_of(self, point: str, name: str) -> str | None:
        """Return the user's extension that registered a name at a point; None if none did or it is built in."""
        return next(
            (
                owner
                for owner, found in self.items()
                if owner != BUILT_IN and any(each.name == name for each in getattr(found, point))
            ),
            None,
        )


@cache
def registry() -> Registry:
    """Return the registry of this process, which is created on the first call."""
    return Registry()


def users_module(option: str, name: str, *, missing: str) -> ModuleType:
    """Import a user's module from Python's module path, or else from the working directory.

    Raises UserError, which begins with `option`, and ends with `missing` if the module does not exist.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return import_module(name)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{name}.".startswith(f"{absent}."):
            raise UserError(f"{option}: Python finds no module {plain(absent)}{missing}") from error
        raise UserError(f"{option} cannot be imported: {described(error)}") from error


def imported(name: str) -> Extension:
    """Return the `EXTENSION` (or the attribute after a colon) of a module, which an entry point may also name.
    Raises UserError.
    """
    found = entry_points_by_name()
    module_name, _, attribute = found.get(name, name).partition(":")
    attribute = attribute or "EXTENSION"
    hint = did_you_mean(name, found) or ": install it, or add its folder to PYTHONPATH"
    module = users_module(f"{FLAG} {plain(name)}", module_name, missing=hint)
    if not isinstance(extension := getattr(module, attribute, None), Extension):
        raise UserError(
            f"{FLAG} {plain(name)}: {plain(module_name)} has no {plain(attribute)} of type "
            f"megavlm.extension.Extension: declare {plain(attribute)} = Extension(…) in it"
        )
    return extension


def entry_points_by_name() -> dict[str, str]:
    """Return the entry points for extensions in installed packages: "module" or "module:attribute", by name."""
    return {point.name: point.value for point in entry_points(group="megavlm.extensions")}


@cache
def _at(point: str, state: State) -> Mapping[str, Any]:
    return registry().at(point)


def registered(point: str) -> Mapping[str, Any]:
    """Return the registered entries at a point ("connectors", …), by name."""
    assert point in POINTS, point
    return _at(point, registry().state)


class Sections(dict[str, Any]):
    """Holds the options of all entries at a point: one section per entry, read as an attribute.

    It is a value like a frozen dataclass: hashable and immutable. It stores only sections that differ from their
    defaults. When it is unpickled in another process, it loads the extensions of the sending process.
    """

    point: str

    def __init__(self, sections: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        given = dict(sections)
        super().__init__({name: given[name] for name in sorted(given) if given[name] != self.default(name)})

    def default(self, name: str) -> Any:
        """Return the section of an entry with all options at their defaults; None if it has no options."""
        found = registered(self.point).get(name)
        return None if found is None or found.options is None else found.options()

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("__") or (default := self.default(name)) is None:
            raise AttributeError(name)
        return default

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError("sections of options do not change: make others")

    def __reduce__(self) -> Any:
        return _restored, (type(self), tuple(self.items()), tuple(name for name in registry() if name != BUILT_IN))


def _restored(kind: type[Sections], items: tuple[tuple[str, Any], ...], extensions: tuple[str, ...]) -> Sections:
    """Load the sender's extensions and return the sections; for unpickling in another process."""
    for name in extensions:
        if name not in registry():
            registry()[name] = imported(name)
    return kind(items)


class ConnectorSections(Sections):
    """Holds the options of connectors: `model.projector.connectors`."""

    point = "connectors"


class ObjectiveSections(Sections):
    """Holds the options of losses: `model.objective.losses`."""

    point = "objectives"


class SourceSections(Sections):
    """Holds the options of data sources: `data.sources`."""

    point = "sources"


class CallbackSections(Sections):
    """Holds the options of callbacks: `logging.callbacks`."""

    point = "callbacks"
