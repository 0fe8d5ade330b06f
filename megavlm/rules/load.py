"""Write and read configurations as YAML, exactly; reading is strict about keys and types, and files may be partial."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from megavlm.config.messages import nearest_names, plain, shown
from megavlm.config.registry import Sections, registered
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.paths import read_bytes
from megavlm.rules.elsewhere import exact_hint, hint
from megavlm.rules.fields import Option, options, with_values
from megavlm.storage import without_secrets

_LARGEST, _MOST_NODES = 2**19, 10**5  # bytes of a file of options (a complete one has 10,000); values in it


def to_yaml(config: Config) -> str:
    """Return all options of a run as YAML. `from_dict(yaml.safe_load(text))` returns the same configuration."""
    # PyYAML's own emitter takes a tenth of a second; libyaml's comes with its wheels, not with every build of it.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(as_data(config), Dumper=dumper, sort_keys=False, width=120)


def as_data(value: Any, *, chosen: bool = False) -> Any:
    """Return options as dicts and lists, for YAML and JSON.

    The result has the sections of all registered entries, or if `chosen` only of entries that the options select, on
    which a model depends.
    """
    if isinstance(value, Sections):
        return {name: as_data(getattr(value, name)) for name, each in registered(value.point).items() if each.options}
    if is_dataclass(value):
        data = {field.name: as_data(getattr(value, field.name), chosen=chosen) for field in fields(value)}
        data = _of_chosen(value, data) if chosen else data
        return {name: item for name, item in data.items() if item != {}}
    return [as_data(item, chosen=chosen) for item in value] if isinstance(value, tuple) else value


def _of_chosen(section: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a section with only those sections of registered entries that its options select."""
    said = {field.metadata["point"]: data[field.name] for field in fields(section) if field.metadata.get("point")}
    for name in [name for name in data if isinstance(getattr(section, name), Sections)]:
        point = getattr(section, name).point
        names = said[point] if isinstance(said[point], list) else [said[point]]
        data[name] = {each: options for each, options in data[name].items() if each in names}
    return data


def from_dict(data: object) -> Config:
    """Return the configuration in nested mappings, as read from YAML; absent keys keep their defaults.

    Raises UserError naming `section.key` for an unknown key (with a suggestion) or a value of the wrong type.
    """
    return with_values(Config(), values_in(data))


def values_in(data: object) -> dict[tuple[str, ...], Any]:
    """Return the values of the options in nested mappings, by path. Raises UserError as `from_dict`."""
    table = {option.key: option for option in options()}
    sections = {".".join(option.path[:depth]) for option in options() for depth in range(1, len(option.path))}
    # These sections exist even if no registered entry has options.
    sections |= {"model.projector.connectors", "model.objective.losses", "data.sources", "logging.callbacks"}
    return dict(_values(data, prefix="", table=table, sections=sections))


def _values(
    data: object, *, prefix: str, table: Mapping[str, Option], sections: set[str]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) of each option at or below `prefix`, which is empty or ends with a dot."""
    if not isinstance(data, Mapping):
        where = prefix.rstrip(".") or "the configuration"
        raise UserError(
            f"{where} expects a mapping of options, got {shown(data)}: give it `key: value` lines or leave it out"
        )
    for name, value in data.items():
        key = f"{prefix}{name}"
        if key in table:
            yield table[key].path, table[key].kind.from_yaml(value, name=key)
        elif key in sections:
            yield from _values(value, prefix=f"{key}.", table=table, sections=sections)
        else:
            meant = exact_hint(str(name), written=in_yaml)
            meant = meant or _suggestion(str(name), prefix=prefix, table=table, sections=sections)
            raise UserError(f"unknown key {plain(key)}{meant}")


def _suggestion(name: str, *, prefix: str, table: Mapping[str, Option], sections: set[str]) -> str:
    """Return a hint for an unknown key: the same name in another section, an alias (`tp`), or a similar name."""
    leaves = {key: key.rpartition(".")[2] for key in table}
    same = [key for key, leaf in leaves.items() if leaf == name.replace("-", "_")]
    same = [key for key in same if not table[key].registers] or same
    aliased = [key for key, option in table.items() if f"--{name.replace('_', '-')}" in option.flags]
    siblings = [key.removeprefix(prefix) for key in (*table, *sorted(sections)) if key.startswith(prefix)]
    siblings = [key for key in siblings if "." not in key]
    alike = nearest_names(name, [*siblings, *leaves.values()])
    alike = [prefix + word for word in alike if word in siblings] or [key for key in table if leaves[key] in alike]
    if meant := same or aliased or alike:
        return f": did you mean {' or '.join(meant[:3])}?"
    return hint(name, written=in_yaml) or f": {prefix.rstrip('.') or 'the top level'} has {', '.join(siblings)}"


def in_yaml(text: str) -> str:
    """Return the text of a hint with keys instead of flags: `--precision bf16` becomes `precision.dtype: bf16`."""
    by_flag = {flag: option for option in options() for flag in (*option.flags, *option.negations)}
    head, comma, note = text.partition(",")
    if head.startswith("--set "):
        key, equals, value = head.removeprefix("--set ").partition("=")
        return key + (f": {value}" if equals else "") + comma + note
    flag, *values = head.split()
    value = f"[{', '.join(values)}]" if by_flag[flag].kind.many else " ".join(values)
    value = "false" if flag in by_flag[flag].negations else value
    note = re.sub(r"--[a-z0-9-]+", lambda found: by_flag[found[0]].key if found[0] in by_flag else found[0], note)
    return by_flag[flag].key + (f": {value}" if values or value == "false" else "") + comma + note


def from_yaml_file(path: str | Path) -> Config:
    """Return the configuration in a YAML file. Raises UserError, which names the file, if it cannot be used."""
    return with_values(Config(), values_in_file(path))


def values_in_file(path: str | Path) -> dict[tuple[str, ...], Any]:
    """Return the values of the options in a YAML file, by path. Raises UserError as `from_yaml_file`."""
    data = read_yaml(path, what="--config")
    if data is None:
        raise UserError(
            f"--config {plain(without_secrets(str(path)))}"
            f" is empty: write options (`train: {{train_iters: 10}}`) or leave out --config"
        )
    if isinstance(data, Mapping) and "architectures" in data:
        raise UserError(
            f"--config {plain(without_secrets(str(path)))} describes a model: give its folder to --init-from, or to "
            "--hf of megavlm plan"
        )
    try:
        return values_in(data)
    except UserError as error:
        raise UserError(f"--config {plain(without_secrets(str(path)))}: {error}") from None


def extensions_in_file(path: str | Path) -> tuple[str, ...]:
    """Return the extensions that a file of options names. Errors are ignored here: reading all options reports them."""
    try:
        data = read_yaml(path, what="--config")
    except UserError:
        return ()
    run = data.get("run") if isinstance(data, Mapping) else None
    names = run.get("extension") if isinstance(run, Mapping) else None
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def read_yaml(path: str | Path, *, what: str) -> Any:
    """Return the data in a YAML file; None if it is empty.

    Raises UserError, which begins with `what` and the file's name, for a file that is no YAML, has a key twice in a
    mapping, or is far larger than options are.
    """
    name = plain(without_secrets(str(path)))
    try:
        text = read_bytes(Path(path), at_most=_LARGEST).decode()
    except UnicodeDecodeError:
        raise UserError(f"{what} {name} cannot be read: it is not UTF-8 text") from None
    except OSError as error:
        is_folder = bool(path) and Path(path).is_dir()
        why = "it is a folder: name the file in it" if is_folder else error.strerror or plain(str(error))
        raise UserError(f"{what} {name} cannot be read: {why}") from None
    return data_of(text, what=f"{what} {name}")


def data_of(text: str, *, what: str) -> Any:
    """Return the data in a YAML text; None if it is empty. Raises UserError as `read_yaml`, beginning with `what`."""
    try:
        _check_nodes(yaml.compose(text, Loader=yaml.SafeLoader), what=what)
        return yaml.safe_load(text)
    except UserError:
        raise
    # PyYAML raises many types on malformed text: YAMLError, ValueError (dates), KeyError (tags), RecursionError.
    except Exception as error:
        raise UserError(f"{what} is not valid YAML{_place(error)}") from None


def _check_nodes(root: Any, *, what: str) -> None:
    """Raise UserError for a repeated key of a mapping, of which YAML would keep the last, and for a document that is
    huge once its aliases are expanded.
    """
    waiting, count = [root], 0
    while waiting:
        node, count = waiting.pop(), count + 1
        if count > _MOST_NODES:
            raise UserError(f"{what} has more than {_MOST_NODES} values with its aliases expanded: write fewer")
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice := [key for key, number in keys.items() if number > 1]:
                raise UserError(f"{what} has {plain(str(twice[0]))} twice in one mapping: merge them or remove one")
            waiting += [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _place(error: Exception) -> str:
    """Return the line and the reason of a YAML error, as one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ""
    return f": line {error.problem_mark.line + 1}: {plain(str(error.problem))}"
