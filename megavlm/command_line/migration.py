"""Convert the configuration of another trainer to ours, by the tables of `migration_tables.py`, and back.

The input is JSON, YAML, or a shell script with the options of a command. Nothing is executed: a variable of a script
that is assigned once, or has a default, is replaced by its text; all other shell expressions are kept unchanged.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from megavlm.command_line import migration_tables as tables
from megavlm.command_line.migration_tables import Given, Kind, NoCounterpart, Row, Values, kinds, normalised
from megavlm.command_line.parsing import parse
from megavlm.config.derived import replica_size
from megavlm.config.messages import plain, shown
from megavlm.config.option import Needs
from megavlm.config.schema import Config, DatasetConfig
from megavlm.errors import UserError
from megavlm.paths import read_bytes
from megavlm.rules import elsewhere
from megavlm.rules.check import check, idle
from megavlm.rules.fields import Option, options, value_at, with_values
from megavlm.rules.load import as_data, data_of, values_in

STATUSES = TAKEN, CHANGED, UNKNOWN = "taken", "changed", "unknown"
KINDS = tuple(kind for kind, each in kinds().items() if not each.otherwise)  # of files that are converted
_LARGEST, _LARGEST_SCRIPT = 2**19, 2**16  # bytes of a file; of a script, as it is and with its variables replaced
_DEEPEST = 4  # variables within variables
_ENVIRONMENT = ("MAX_PIXELS", "MIN_PIXELS", "NPROC_PER_NODE", "NNODES")  # environment variables of ms-swift
_COMMENT, _QUOTED_LIST = re.compile(r"(?m)(^|\s)#.*$"), re.compile(r'"(\$\{\w+\[@\]\})"')
_COMPUTED = re.compile(r"\$\(+[^()]*\)+|`[^`]*`")
_VALUE = r"""\([^()"']*(?:(?:"[^"]*"|'[^']*')[^()"']*)*\)|"[^"]*"|'[^']*'|[^\s;|&()]*"""
_BEGIN, _END = r"(?:^|[;&]|\b(?:then|else|do)\b)[ \t]*(?:export[ \t]+)?", r"(?=[ \t]*(?:$|[;&]))"
_ASSIGNED = re.compile(rf"(?m){_BEGIN}([A-Za-z_]\w*)=({_VALUE}){_END}")
_VARIABLE = re.compile(r"(?<!--)\$(?:(\w+)|\{(\w+)(?:\[@\]|:?-([^{}]*))?\})")
_FLAG = re.compile(r"(?s)--?([A-Za-z][\w-]*|\$\w+)(?:=(.*))?")
# Comments, which DeepSpeed allows in its JSON. Texts are found first, because they may hold the marks of a comment.
_JSON_COMMENT = re.compile(r'(?s)("(?:\\.|[^"\\])*"?)|(?://|#)[^\n]*|/\*.*?(?:\*/|\Z)')


@dataclass(frozen=True)
class Line:
    """Conversion of a key of a file: `ours` are the values that it sets here; `note` explains differences, or why there
    is no counterpart.
    """

    key: str
    value: Any
    status: str = TAKEN
    ours: Values = field(default_factory=dict)
    note: str = ""
    default: bool = False  # the file leaves the key out

    def __str__(self) -> str:
        ours = ", ".join(f"{key}: {_shown(value)}" for key, value in self.ours.items())
        said = f"  {plain(self.key)}: {_shown(self.value)}" + (f" → {ours}" if ours else "")
        return said + (f"\n      {self.note}" if self.note else "")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() and 0 < len(value) < 80 else shown(value)


@dataclass(frozen=True)
class Migration:
    """Result of the conversion of files to our configuration.

    Args:
        kinds: name of each file's kind.
        lines: conversion of each key.
        remarks: differences between the trainers that do not depend on the files.
        values: values of our options, by key.
        waiting: values by key that have no effect until the user names data sets.
    """

    kinds: list[str]
    lines: list[Line]
    remarks: list[str]
    values: Values
    waiting: Values

    def check(self) -> None:
        """Raise UserError if a run would refuse the values; the layout is checked only if the model shape is known."""
        config, known = _config(self.values), any(key.startswith("model.language.") for key in self.values)
        ranks = replica_size(config)
        world = max(1, (config.run.world_size or 1) // ranks)
        if not known:
            split = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model")
            config = with_values(config, {("parallel", f"{each}_parallel_size"): 1 for each in split})
            if "audio" in (*(config.model.freeze or ()), *config.lora.targets):
                config = with_values(config, {("model", "audio", "num_layers"): 1, ("model", "audio_token"): 1})
        try:
            check(config, world=world * ranks if known else world)
        except UserError as error:
            raise UserError(f"nothing is written, as what follows from the file is refused: {error}") from None


def migrated(files: Sequence[Path], *, kind: str | None = None, world: int | None = None) -> Migration:
    """Convert the files of one configuration, for `world` processes (default: the number in the files).

    Raises UserError for a file that cannot be read, or that without `kind` is of no known kind.
    """
    found = [(data, kinds()[kind or _kind_of(data, file)]) for file in files for data in (_read(file),)]
    lines, values, waiting = _settled(list(_translated(found, world)))
    remarks = list(dict.fromkeys(each for _, one in found for each in one.remarks))
    return Migration([one.name for _, one in found], lines, remarks, values, waiting)


def sent_back(file: Path, to: str) -> tuple[list[Line], dict[str, Any], str]:
    """Convert a file of ours to the trainer `to`: return the conversion of each key, the content of the trainer's file,
    and the name of that file.
    """
    said, kind = parse(["--config", str(file)]), kinds()[f"to-{to}"]
    values = {option.key: as_data(value_at(said, option.path)) for option in options()}
    rows = [(option, kind.rows.get(normalised(option.key))) for option in options()]
    here = [each for each, row in rows if value_at(said, each.path) != each.default or (row and not row.refuse)]
    lines = [line_of(kind, option.key, values[option.key], values) for option in here]
    return [line for line in lines if line.ours or line.note], nested(_values(lines)), kind.marks[0]


def _kind_of(data: Mapping[str, Any], file: Path) -> str:
    """Return the kind of a file by the option names in it. Raises UserError if no kind matches."""
    names = {normalised(name) for name in data}
    hits = {kind: len(names.intersection(each.marks)) for kind, each in kinds().items()}
    best = max(hits, key=lambda kind: hits[kind])
    if not hits[best]:
        known = ", ".join(dict.fromkeys(each.name for each in kinds().values()))
        raise UserError(f"{plain(str(file))} has no option that tells whose it is ({known}): say it with --from")
    return best


def _translated(found: Sequence[tuple[Mapping[str, Any], Kind]], world: int | None) -> Iterator[Line]:
    """Yield the conversion of each key of the files; a file's keys follow its trainer's defaults that differ here."""
    given = {normalised(name): value for data, _ in found for name, value in data.items() if value is not None}
    given["processes"] = world or tables.processes(given) or tables.fewest_processes(given)
    found_keys: set[str] = set()
    for data, kind in found:
        whole, spelled = kind.with_defaults(given), max("-_", key="".join(data).count)
        left = {name.replace("-", spelled): value for name, value in whole.items() if name not in given}
        lines = [line_of(kind, name, value, whole, default=True) for name, value in left.items()]
        lines += [line_of(kind, name, value, whole) for name, value in data.items()]
        found_keys |= _values(lines).keys()
        yield from lines
    batch, ranks = tables.samples_at_a_time(given), given["processes"]
    if "train.global_batch_size" not in found_keys:
        note = "no file says it: a micro-batch for each process with other samples"
        yield Line("(global batch)", batch, CHANGED, {"train.global_batch_size": batch}, note)
    note = "torchrun starts them; this number is for --dry-run, and the global batch is of so many: --world-size"
    yield Line("(processes)", ranks, CHANGED, {"run.world_size": ranks}, note)


def line_of(kind: Kind, key: str, value: Any, given: Given, *, default: bool = False) -> Line:
    """Return the conversion of a key of a file; if `kind` has `otherwise`, of one of our keys to that kind."""
    line = Line(key, value, default=default)
    if value is None:
        return line
    try:
        if _asks_shell(value) or _asks_shell(key):
            raise NoCounterpart("only a shell knows it: write the value into the file")
        row = kind.rows.get(normalised(key))
        if value == "auto" and row is not None:
            raise NoCounterpart("arguments of the training script fill it in: give their file to this command as well")
        row = row or _general(kind, normalised(key))
        ours = row.values(value, given)
        ours = ours if kind.otherwise else {name: _converted(name, each) for name, each in ours.items()}
    except (NoCounterpart, UserError) as error:
        return replace(line, status=UNKNOWN, note=str(error))
    except (ValueError, TypeError, LookupError, ArithmeticError):
        return replace(line, status=UNKNOWN, note="this value is not understood")
    changed = bool(row.differs and (ours or not row.to))
    return replace(line, ours=ours, status=CHANGED if changed else TAKEN, note=row.differs if changed else "")


def _general(kind: Kind, name: str) -> Row:
    """Return a row for a name that is in no table, from our option of that name or from `rules/elsewhere.toml`."""
    by_flag = {flag: option.key for option in options() for flag in (*option.flags, option.spelled)}
    if f"--{name}" in by_flag:
        return Row(by_flag[f"--{name}"])
    meaning = kind.otherwise or elsewhere.meanings().get(name.rpartition(".")[2])
    if meaning is None:
        raise NoCounterpart("nothing here is called so, and no table has it: see --help-all of megavlm train")
    head, comma, _ = meaning.partition(",")
    if not head.startswith("--"):
        raise NoCounterpart(meaning)
    flag, *words = head.removeprefix("--set ").replace("=", " ").split()
    if comma or len(words) > 1:
        raise NoCounterpart(f"here it is {meaning}")
    key = by_flag.get(flag, flag)
    switch = {"true": yaml.safe_load(words[0]), "false": {}} if words else None
    return Row(key, words=switch, otherwise=f"here it is {meaning}" if words else "")


def _converted(key: str, value: Any) -> Any:
    """Return a value in the form of our files. Raises UserError if the option does not accept the value."""
    option = next(option for option in options() if option.key == key)
    kind = option.kind
    value = [value] if kind.many and not isinstance(value, list) else value
    if kind.scalar is int and isinstance(value, float | str) and float(value).is_integer():
        value = int(float(value))  # DeepSpeed's 5e8, and variables of the environment
    if kind.choices and isinstance(value, str):
        value = elsewhere.choice_of(value, kind.choices) or value
    found = kind.from_yaml(value, name=key)
    if option.valid is not None and not kind.many and not option.valid.holds(found):
        raise UserError(f"{key} {found} must be {option.valid.words}")
    return value if kind.is_record else as_data(found)


def _settled(lines: Sequence[Line]) -> tuple[list[Line], dict[str, Any], dict[str, Any]]:
    """Resolve conflicts and drop options without effect. Return the final lines, the values, and the values of options
    that have an effect only with data sets, which only the user can name.
    """
    values, waiting, notes = _values(lines), dict[str, Any](), dict[str, str]()
    for conflict in tables.conflicts():
        if conflict.holds(values):
            notes[conflict.key] = conflict.why
            values |= {conflict.key: conflict.becomes}
            values = {key: value for key, value in values.items() if value is not None}
    while found := _idle(values, beside_data=True):
        option, needs = found
        notes[option.key] = f"no effect {needs.lacking}: {needs.remedy}"
        del values[option.key]
    while found := _idle(values, beside_data=False):
        waiting[found[0].key] = values.pop(found[0].key)
    return [_final(line, values | waiting, waiting, notes) for line in lines], values, waiting


def _final(line: Line, values: Values, waiting: Values, notes: Mapping[str, str]) -> Line:
    """Return a line with the final values, and a note if they differ from those of the line."""
    if all(key in values and values[key] == value for key, value in line.ours.items()):
        late = "it needs --datasets: it is in the command below" * bool(waiting.keys() & line.ours.keys())
        return replace(line, note=line.note or late)
    why = next((notes[key] for key in line.ours if key in notes), "" if line.default else "another key says otherwise")
    ours = {key: values[key] for key in line.ours if key in values and why}
    return replace(line, ours=ours, status=CHANGED if ours else UNKNOWN, note=why)


def _values(lines: Iterable[Line]) -> dict[str, Any]:
    return {key: value for line in lines for key, value in line.ours.items()}


def _idle(values: Values, *, beside_data: bool) -> tuple[Option, Needs] | None:
    """Return an option without effect and its unmet need, or None; `beside_data`: assume that data sets are given."""
    config = _config(values)
    if beside_data and not config.data.datasets:
        config = replace(config, data=replace(config.data, datasets=(DatasetConfig(path="data.json"),)))
    typed = [option.path for option in options() if option.key in values]
    return next((found for found in idle(config, typed=typed) if found[0].key in values), None)


def _config(values: Values) -> Config:
    """Return the configuration of these values; 64 experts are assumed if given weights seem to have experts."""
    given = "checkpoint.init_from" in values and any("expert" in key or "moe" in key for key in values)
    return with_values(Config(), values_in(nested({"model.experts.num_experts": 64, **values} if given else values)))


def nested(values: Values) -> dict[str, Any]:
    """Return values by key as nested mappings, in the order of our options."""
    order = [option.key for option in options()]
    found: dict[str, Any] = {}
    for key in sorted(values, key=lambda key: order.index(key) if key in order else len(order)):
        *sections, name = key.split(".")
        into = found
        for section in sections:
            into = into.setdefault(section, {})
        into[name] = values[key]
    return found


def _read(path: Path) -> dict[str, Any]:
    """Return the values in a file by name: nested names are joined by dots, flags of a script have no leading dashes.

    Raises UserError, in one line, if the file cannot be read.
    """
    what = plain(str(path))
    try:
        text = read_bytes(path, at_most=_LARGEST).decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{what} cannot be read: {getattr(error, 'strerror', None) or plain(str(error))}") from None
    if path.suffix in (".yaml", ".yml"):
        data = data_of(text, what=what)
    elif path.suffix == ".json" or text.lstrip()[:1] == "{":
        try:
            data = json.loads(_JSON_COMMENT.sub(r"\1", text))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{what} is not valid JSON: {plain(str(error))}") from None
    else:
        data = dict(_of_command(_words(text, what=what)))
    if not isinstance(data, Mapping) or not data:
        raise UserError(f"{what} has no options: name a file of `key: value` lines, or a script with a command")
    return dict(_flat(data))


def _asks_shell(value: Any) -> bool:
    """Return whether a value of a script contains a shell expression that was not replaced."""
    words = value if isinstance(value, list) else [value]
    return any(isinstance(word, str) and re.search(r"\$[\w({@*#]|`", word) for word in words)


def _flat(data: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _words(text: str, *, what: str) -> list[str]:
    """Return the words of the command with the most options in a script, after its environment variables."""
    text = _QUOTED_LIST.sub(r"\1", _COMMENT.sub(r"\1", text[: _LARGEST_SCRIPT + 1]).replace("\\\n", " "))
    text = _COMPUTED.sub(lambda found: "`" + re.sub(r"[\s()|;&`]", "", found[0]) + "`", text)
    assigned: dict[str, set[str]] = {}
    for name, value in _ASSIGNED.findall(text):
        bare = value[1:-1] if value[:1] in ("(", '"', "'") else value
        bare = re.sub(rf"\$\{{{name}:?-([^{{}}]*)\}}", r"\1", bare)  # NAME=${NAME:-default}
        assigned.setdefault(name, set()).add(" ".join(bare.split()))
    size = len(text)

    def replaced(found: re.Match[str]) -> str:
        nonlocal size
        name = found[1] or found[2]
        values = assigned.get(name, set() if found[3] is None else {found[3]})
        several = f"--${name}" if any("--" in value for value in values) else found[0]  # one branch assigns options
        value = next(iter(values)) if len(values) == 1 else several
        size += len(value)
        return value if size <= _LARGEST_SCRIPT else ""

    once = [f"{name}={value}" for name in _ENVIRONMENT if len(assigned.get(name, ())) == 1 for value in assigned[name]]
    text = _ASSIGNED.sub("", text)
    for _ in range(_DEEPEST):
        text = _VARIABLE.sub(replaced, text)
    if size > _LARGEST_SCRIPT:
        raise UserError(f"{what} is too large for a script: give the command alone")
    commands = [_split(line) for line in re.split(r"[\n;|&]+", text)]
    most = max(commands, key=lambda words: sum(bool(_FLAG.fullmatch(word)) for word in words))
    return once + [word for word in most if not word.endswith(".py")]


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # quotes over several lines
        return line.split()


def _of_command(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the (name, value) pairs of a command's environment variables, and then of its options."""
    flags = [(place, found) for place, word in enumerate(words) if (found := _FLAG.fullmatch(word))]
    pairs = (word.partition("=") for word in words)
    yield from ((name, _value([value])) for name, _, value in pairs if name in _ENVIRONMENT)
    ends = [*(place for place, _ in flags), len(words)][1:]
    for (place, flag), end in zip(flags, ends, strict=True):
        yield flag[1], _value([flag[2]] * (flag[2] is not None) + words[place + 1 : end])


def _value(words: list[str]) -> Any:
    """Return the value of the words after a flag: True without words, a JSON value, a text, or a list of several."""
    values = []
    for word in words:
        try:
            values.append(json.loads(word.lower() if word.lower() in ("true", "false") else word))
        except (ValueError, RecursionError):
            values.append(word)
    return values if len(values) > 1 else values[0] if values else True
