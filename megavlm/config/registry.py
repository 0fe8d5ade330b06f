"""What extensions add under names: connectors, sources of samples and the like, and the options that these bring.

An extension is a value of type `Extension` that a package declares. This module holds the ones of this process, in one
table that only grows, before anything reads it: `extensions.py` fills it from what the user names. What the package
itself has to offer at these points is an extension too (`BUILT_IN`), found by its name like a user's, because the
configuration knows none of the parts that are built on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from typing import Any, Protocol

BUILT_IN = ("megavlm.arch.connectors",)


class Named(Protocol):
    """Something that an option names, with a frozen dataclass of options of its own, if it has any."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> type | None: ...


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
    """A loss of embeddings: the code is a function as `megavlm.objective.contrastive.info_nce`.

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

    connectors: tuple[Named, ...] = ()
    inputs: tuple[Entry, ...] = ()
    objectives: tuple[ObjectiveEntry, ...] = ()
    sources: tuple[Entry, ...] = ()
    callbacks: tuple[Entry, ...] = ()
    families: tuple[Entry, ...] = ()


POINTS = tuple(field.name for field in fields(Extension))
OPEN_POINTS = {"callbacks": (), "inputs": ("rgb", "array")}  # where options say other things too, such as these


State = tuple[tuple[str, Extension], ...]


class Registry:
    """The extensions of a process by the names under which they were asked for."""

    def __init__(self) -> None:
        self._extensions: dict[str, Extension] = {}

    def __len__(self) -> int:
        return len(self._extensions)

    def __iter__(self) -> Iterator[str]:
        return iter(self._extensions)

    def __getitem__(self, name: str) -> Extension:
        return self._extensions[name]

    @property
    def state(self) -> State:
        """Return all that is there, as a value: what follows from it may be kept by it."""
        return tuple(self._extensions.items())

    def add(self, name: str, extension: Extension) -> None:
        """Add an extension. Who adds it has checked that its names are new."""
        self._extensions[name] = extension

    def remove(self, name: str) -> None:
        """Remove an extension whose names turned out to be taken."""
        del self._extensions[name]

    def at(self, point: str) -> dict[str, Named]:
        """Return what there is at a point, by name."""
        return {each.name: each for found in self._extensions.values() for each in getattr(found, point)}

    def owner_of(self, point: str, name: str) -> str | None:
        """Return which of the user's extensions has a name at a point; None if the package itself does, or nobody."""
        return next(
            (
                owner
                for owner, found in self._extensions.items()
                if owner not in BUILT_IN and any(each.name == name for each in getattr(found, point))
            ),
            None,
        )


@cache
def registry() -> Registry:
    """Return the process's table, which begins with what the package itself offers."""
    found = Registry()
    for name in BUILT_IN:
        found.add(name, from_code(f"{name}:EXTENSION"))
    return found


@cache
def _at(point: str, state: State) -> Mapping[str, Named]:
    return registry().at(point)


def registered(point: str) -> Mapping[str, Named]:
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
        return _restored, (type(self), tuple(self.items()), tuple(name for name in registry() if name not in BUILT_IN))


def _restored(kind: type[Sections], items: tuple[tuple[str, Any], ...], extensions: tuple[str, ...]) -> Sections:
    """Return the sections in a process to which they were sent, with the extensions that the sender has."""
    from megavlm.config.extensions import load_extensions

    load_extensions(extensions)
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
