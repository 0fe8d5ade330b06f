"""What extensions add under names: connectors, sources of samples and the like, and the options that these bring.

An extension is a value of type `Extension` that a package declares. This module holds the ones of this process, in one
table that only grows, before anything reads it: `megavlm.arch` enters the connectors of this package, which the
configuration does not know, and `rules/extensions.py` what the user names.
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

BUILT_IN = "megavlm"  # the name of what this package enters itself
FLAG = "--extension"


@dataclass(frozen=True)
class Entry:
    """Something that is imported when it is used, so that a command line is read without it.

    Args:
        name: what the user calls it.
        code: where it is, as "package.module:name".
        options: a frozen dataclass, each of whose fields is made with `option()`; None: it has no options.
    """

    name: str
    code: str
    options: type | None = None

    def load(self) -> Any:
        """Import and return what the entry stands for."""
        return from_code(self.code)


@dataclass(frozen=True)
class ObjectiveEntry(Entry):
    """A loss of embeddings: the code is a function as `megavlm.objective.losses.info_nce`.

    Args:
        learned: parameters of the loss that model.objective.learn_temperature trains: ("log_scale",), or none.
        counted: what a loss is the mean over, as metrics call it.
    """

    learned: tuple[str, ...] = ()
    counted: str = "pairs"


def from_code(code: str) -> Any:
    """Return what "package.module:name" stands for."""
    module, _, attribute = code.partition(":")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True)
class Extension:
    """All that a package adds.

    Args:
        connectors: kinds of projector (`megavlm.extension.Connector`), for --projector-kind.
        inputs: what a model sees of an image file (`megavlm.inputs.vision_inputs.VisionInput`), for
            --vision-input. Its function is sent to processes that decode images, so it has a name in a module.
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
OPEN_POINTS = {"callbacks": (), "inputs": ("rgb", "array")}  # where options say other things too, such as these


State = tuple[tuple[str, Extension], ...]


class Registry(dict[str, Extension]):
    """The extensions of a process by the names under which they were asked for."""

    @property
    def state(self) -> State:
        """Return all that is there, as a value: what follows from it may be kept by it."""
        return tuple(self.items())

    def at(self, point: str) -> dict[str, Any]:
        """Return what there is at a point, by name."""
        return {each.name: each for found in self.values() for each in getattr(found, point)}

    def owner_of(self, point: str, name: str) -> str | None:
        """Return which of the user's extensions has a name at a point; None if the package itself does, or nobody."""
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
    """Import a module of a user's, which is found where Python finds them, and then in the working directory.

    Raises UserError, which begins with `option`, and ends with `missing` if there is no such module.
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
    """Return the `EXTENSION` (or what is said after a colon) of a module, or of the one that an entry point names.

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
    """Return what installed packages name as extensions, by the names under which they do."""
    return {point.name: point.value for point in entry_points(group="megavlm.extensions")}


@cache
def _at(point: str, state: State) -> Mapping[str, Any]:
    return registry().at(point)


def registered(point: str) -> Mapping[str, Any]:
    """Return what there is at a point ("connectors", …), by name."""
    assert point in POINTS, point
    return _at(point, registry().state)


class Sections(dict[str, Any]):
    """Holds the options of everything registered at a point, in a section for each name, read as an attribute.

    It is a value like a frozen dataclass: hashable, and never changed. It keeps the sections that differ from their
    defaults. In another process it loads the extensions to which its sections belong.
    """

    point: str

    def __init__(self, sections: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        given = dict(sections)
        super().__init__({name: given[name] for name in sorted(given) if given[name] != self.default(name)})

    def default(self, name: str) -> Any:
        """Return the section of a name as it is if nothing is set; None if there is none."""
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
    """Return the sections in a process to which they were sent, with the extensions that the sender has."""
    for name in extensions:
        if name not in registry():
            registry()[name] = imported(name)
    return kind(items)


class ConnectorSections(Sections):
    """`model.projector.connectors`: the options of connectors."""

    point = "connectors"


class ObjectiveSections(Sections):
    """Holds the options of losses: `model.objective.losses`."""

    point = "objectives"


class SourceSections(Sections):
    """`data.sources`: the options of sources of samples."""

    point = "sources"


class CallbackSections(Sections):
    """`logging.callbacks`: the options of callbacks."""

    point = "callbacks"
