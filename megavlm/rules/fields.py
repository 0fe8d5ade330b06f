"""The options of `Config` and their types, read from the dataclasses; flags, YAML and messages use this table.

`options()` returns each field of `Config` as an `Option`. Its `Kind` converts a YAML value or the words after a flag
to the field's value, or raises a UserError of one line that names the option, the value and what is expected.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import megavlm.arch  # noqa: F401 (enters the connectors, whose options are in the table)
from megavlm.config.messages import did_you_mean, plain, shown
from megavlm.config.option import KEY_ONLY, Needs, Valid
from megavlm.config.registry import OPEN_POINTS, Sections, State, registered, registry
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.rules.elsewhere import value_hint

# The shape of a model is a file format: in these sections, only options that declare a flag have one.
SHAPE = ("model.audio", "model.vision", "model.projector", "model.language", "model.experts")
# Prefixes of flags of sections whose field names also occur in other sections.
PREFIXES = {
    "audio": "audio",
    "vision": "vision",
    "projector": "projector",
    "language": "language",
    "lora": "lora",
    "experts": "moe",
}

_SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a text", dict: "a mapping of texts"}
_PLURALS = {int: "integers", str: "texts"}


@dataclass(frozen=True)
class Kind:
    """The type of an option: a scalar or one of `choices`; a tuple of these if `many`; None is valid if `optional`.

    If the scalar is a dataclass, YAML has a mapping and a flag takes `FIRST_FIELD,field=value,…`.
    """

    scalar: type
    choices: tuple[str, ...] = ()
    many: bool = False
    optional: bool = False

    @property
    def expected(self) -> str:
        """Return a description of valid values."""
        if self.choices:
            return f"{'a list of any of' if self.many else 'one of'} {', '.join(self.choices)}"
        if self.is_record:
            return f"a list of mappings with {', '.join(_kinds(self.scalar))}"
        return f"a list of {_PLURALS[self.scalar]}" if self.many else _SCALARS[self.scalar]

    @property
    def is_record(self) -> bool:
        return is_dataclass(self.scalar)

    def from_yaml(self, value: object, *, name: str) -> Any:
        """Return the field's value for a YAML value; types are strict. Raises UserError naming `name`."""
        expected = f"{self.expected} or null" if self.optional else self.expected
        if value is None and self.optional:
            return None
        if not self.many:
            return self._scalar(value, name=name, expected=expected)
        if not isinstance(value, (list, tuple)):
            how = f"[{self._as_mapping(value)}]" if self.is_record and isinstance(value, str) else "it in [brackets]"
            raise UserError(f"{name} expects {expected}, got {shown(value)}: write {how}")
        return tuple(self._scalar(item, name=name, expected=expected) for item in value)

    def from_words(self, words: Sequence[str], *, name: str) -> Any:
        """Return the field's value for the words after a flag. Raises UserError naming `name`."""
        expected = f"{self.expected} or none" if self.optional else self.expected
        word, parts = words[0].lower() if len(words) == 1 else "", self.many and bool(self.choices)
        if parts and word == "none":  # of `--freeze`, which is not its default
            return ()
        if self.optional and word == ("default" if parts else "none"):
            return None
        if self.many:
            expected += " (separated by spaces)"
        if self.is_record:
            return tuple(record_of_word(self.scalar, word, name=name) for word in words)
        values = tuple(self._scalar(self._parsed(word), name=name, expected=expected) for word in words)
        return values if self.many else values[0]

    def _parsed(self, word: str) -> object:
        """Return a word as a YAML value; a word that is no integer stays text, which `_scalar` rejects."""
        if self.scalar is int:
            try:
                return int(word)
            except ValueError:
                return word
        return word

    def _as_mapping(self, value: str) -> str:
        return f"{{{next(iter(_kinds(self.scalar)))}: {shown(value)}}}"

    def _scalar(self, value: object, *, name: str, expected: str) -> Any:
        wrong = f"{name} expects {expected}, got {shown(value)}"
        if self.is_record:
            if not isinstance(value, Mapping):
                raise UserError(f"{wrong}: write {self._as_mapping(value)}" if isinstance(value, str) else wrong)
            return record_of(self.scalar, value, name=name)
        if self.choices:
            if value in self.choices:
                return value
            # `vision,projector` is a list in the wrong syntax: a suggestion for one misspelt choice would mislead.
            word = str(value)
            near = value_hint(word, self.choices) or did_you_mean(word, self.choices)
            raise UserError(wrong if "," in word else wrong + near)
        # bool is an int to Python, but `micro_batch_size: true` is a mistake.
        if isinstance(value, bool) and self.scalar is not bool:
            raise UserError(wrong)
        if self.many and self.scalar is str and isinstance(value, int):  # `iterations_to_skip: [12, 40-45]`
            value = str(value)
        if self.scalar is float and isinstance(value, (int, float, str)):
            return _finite(value, wrong=wrong)
        if self.scalar is dict and isinstance(value, str):  # as a flag says it
            pairs = [pair.partition(":") for pair in value.split("+")]
            if not all(key and colon and name for key, colon, name in pairs):
                raise UserError(f"{wrong}: write FIELD:NAME+FIELD:NAME")
            value = {key: name for key, _, name in pairs}
        if not isinstance(value, self.scalar):
            raise UserError(wrong)
        if isinstance(value, dict) and not all(isinstance(each, str) for pair in value.items() for each in pair):
            raise UserError(wrong)
        if value == "" and (self.optional or self.many):  # of a variable of the shell that is not set, say
            raise UserError(f"{name} is empty: give it a value, or leave it out")
        if isinstance(value, str) and (shells := re.match(r"~|\$\w+(?=/|$)|\$\{\w+\}(?=/|$)", value)):
            what = f"starts with {shells[0]}, which only a shell expands"
            raise UserError(f"{name} {shown(value)} {what}: write the full path")
        if isinstance(value, int) and value.bit_length() > 63:
            raise UserError(f"{wrong}, which needs more than 64 bits")
        return value


def _kinds(record: Any) -> dict[str, Kind]:
    hints = get_type_hints(record)
    return {field.name: _kind(hints[field.name]) for field in fields(record) if not is_sections(hints[field.name])}


def record_of(record: Any, values: Mapping[Any, object], *, name: str) -> Any:
    """Return an instance of the dataclass of options `record` with these values. Raises UserError, which names `name`,
    for an unknown key, and for a value of the wrong type or out of its range.
    """
    kinds, hints = _kinds(record), get_type_hints(record, include_extras=True)
    for key in values:
        if key not in kinds:
            raise UserError(
                f"{name} has no {plain(str(key))}{did_you_mean(str(key), kinds) or ': use ' + ', '.join(kinds)}"
            )
    found = record(**{key: kinds[key].from_yaml(value, name=f"{name} {key}") for key, value in values.items()})
    for field in fields(record):
        valid, value = field.metadata.get("valid") or _range(hints[field.name]), getattr(found, field.name)
        if valid is not None and value is not None and not valid.holds(value):
            raise UserError(f"{name} {field.name} {value} must be {valid.words}")
    return found


def record_of_word(record: Any, word: str, *, name: str) -> Any:
    """Return a dataclass instance for `FIRST_FIELD,field=value,…`."""
    first, *rest = word.split(",")
    if first.partition("=")[0] in [*_kinds(record)][1:] and "=" in first:
        raise UserError(f"{name} {plain(word)} names no PATH: write {name} PATH,{plain(word)} without a space")
    pairs = [tuple(each.strip() for each in part.partition("=")) for part in rest]
    for key, equals, _ in pairs:
        if not equals:
            raise UserError(
                f"{name} {plain(word)}: {plain(key)} is not key=value: write {name} PATH,key=value,… and spaces "
                "between data sets"
            )
    return record_of(record, {next(iter(_kinds(record))): first, **{key: value for key, _, value in pairs}}, name=name)


def _finite(value: int | float | str, *, wrong: str) -> float:
    """Return a number as a finite float. Text is converted too, because YAML 1.1 reads 1e-4 (no dot) as text."""
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise UserError(wrong) from None
    if not math.isfinite(number):
        raise UserError(wrong)
    return number


@dataclass(frozen=True)
class Option:
    """A field of `Config` at `path`, for example ("model", "vision", "num_layers")."""

    path: tuple[str, ...]
    kind: Kind
    default: Any
    help: str
    aliases: tuple[str, ...]
    own_flag: str | None  # None: the flag follows from the path; KEY_ONLY: it has none
    common: str | None  # its group in `--help`; None: only `--help-all` lists it
    valid: Valid | None  # the range of a number; None: it has none, or one that depends on other options
    needs: tuple[Needs, ...]  # conditions under which the option has an effect
    point: str | None  # extension point whose registered names are valid values
    registers: bool  # whether it is an option of a registered entry, such as a connector

    @property
    def key(self) -> str:
        """Return the option's name in YAML: `model.vision.num_layers`."""
        return ".".join(self.path)

    @property
    def section(self) -> str:
        return ".".join(self.path[:-1])

    @property
    def spelled(self) -> str:
        """Return the flag that follows from the path: `--train-iters`, `--vision-num-layers`."""
        prefix = PREFIXES.get(self.path[-2], self.path[-2] if self.registers else None)
        return "--" + "-".join(filter(None, (prefix, self.path[-1]))).replace("_", "-")

    @property
    def flag(self) -> str:
        """Return the option's flag; KEY_ONLY if only files and `--set` can set it."""
        if self.own_flag is not None:
            return self.own_flag
        return KEY_ONLY if self.section.startswith(SHAPE) else self.spelled

    @property
    def name(self) -> str:
        """Return the option's name in messages: its flag, or its key if it has no flag."""
        return self.flag or self.key

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flag and its aliases; empty if the option has no flag."""
        return (self.flag, *self.aliases) if self.flag else ()

    @property
    def negations(self) -> tuple[str, ...]:
        """Return the flags that switch a boolean off: `--no-` with each of its flags; empty for other types."""
        return tuple(f"--no-{flag[2:]}" for flag in self.flags) if self.kind.scalar is bool else ()


def options() -> tuple[Option, ...]:
    """Return all options of `Config` and of extensions, in the order of the schema, section by section."""
    return _all_options(registry().state)


@cache
def _all_options(state: State) -> tuple[Option, ...]:
    return tuple(_options(Config, ()))


def _options(section: Any, path: tuple[str, ...], *, registers: bool = False) -> Iterable[Option]:
    hints = get_type_hints(section, include_extras=True)
    nested: list[tuple[str, Any]] = []
    for field in fields(section):
        hint = hints[field.name]
        if is_sections(hint):
            nested += [(f"{field.name}.{each.name}", each.options) for each in registered(hint.point).values()]
            continue
        if is_dataclass(hint):
            nested.append((field.name, hint))
            continue
        assert field.default is not MISSING, f"{section.__name__}.{field.name} must be made with option()"
        kind = _kind(hint)
        if (point := field.metadata["point"]) is not None and point not in OPEN_POINTS:
            kind = replace(kind, choices=(*kind.choices, *registered(point)))
        if field.default is None:  # also where `resolve` fills it in, so that the type does not say it
            kind = replace(kind, optional=True)
        # The metadata's keys are help, aliases, own_flag, common, valid, needs and point.
        declared = {**field.metadata, "valid": field.metadata["valid"] or _range(hint)}
        yield Option((*path, field.name), kind, field.default, registers=registers, **declared)
    for name, below in nested:
        if below is not None:
            yield from _options(below, (*path, *name.split(".")), registers=registers or "." in name)


def is_sections(annotation: Any) -> bool:
    """Return whether a field's type is a subclass of `Sections`, which holds the options of registered entries."""
    return isinstance(annotation, type) and issubclass(annotation, Sections)


def _range(annotation: Any) -> Valid | None:
    """Return the range that a type or a part of it has; None if it has none."""
    if get_origin(annotation) is Annotated:
        return cast(Valid, annotation.__metadata__[0])
    return next(filter(None, map(_range, get_args(annotation))), None)


def _kind(annotation: Any) -> Kind:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin in (types.UnionType, Union):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return replace(_kind(inner), optional=True)
    if origin is Mapping:
        return Kind(scalar=dict)
    if origin is tuple:
        return replace(_kind(arguments[0]), many=True)
    if origin is Literal:
        return Kind(scalar=str, choices=arguments)
    if isinstance(annotation, type) and is_dataclass(annotation):
        return Kind(scalar=annotation)
    assert annotation in _SCALARS, f"the schema uses a type that flags cannot express: {annotation}"
    return Kind(scalar=annotation)


def with_values(config: Config, values: Mapping[tuple[str, ...], Any]) -> Config:
    """Return a copy of `config` with the values at the given paths replaced."""
    return _replaced(config, values)


def _replaced(section: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    changes = {path[0]: value for path, value in values.items() if len(path) == 1}
    for head in {path[0] for path in values if len(path) > 1}:
        below = {path[1:]: value for path, value in values.items() if path[0] == head}
        changes[head] = _replaced(getattr(section, head), below)
    return type(section)({**section, **changes}) if isinstance(section, Sections) else replace(section, **changes)


def value_at(config: Config, path: Sequence[str]) -> Any:
    """Return the value of the field at `path`."""
    value: Any = config
    for name in path:
        value = getattr(value, name)
    return value
