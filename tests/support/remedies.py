"""Follow the advice of a message, as a user does who takes it at its word: the command lines that it proposes.

Inside, `--set KEY=VALUE` is a word KEY and its values, so that a key is followed as a flag is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from megavlm.command_line.words import RUN_FLAGS
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.rules.fields import Option, options

T = TypeVar("T")
SECTIONS = "|".join(field.name for field in fields(Config))
KEY = rf"(?:{SECTIONS})\.[\w.]*\w"
FLAG = rf"(?:--?[a-zA-Z][\w-]*|{KEY})"
NUMBER = r"-?\d+(?:\.\d+)?"
STEPS = 5  # advice upon advice that a user takes
# What stands for a value in a message; no folder and no file of that name has to be there for the rules.
WORDS = {"DIR": "d", "PATH": "d", "NAME": "d", "FILE": "d", "N": "1", "VALUE": "1", "T": "1", "H": "1", "W": "1"}


def rows_by_section() -> dict[str, list[list[str]]]:
    """Return the rows of the table of mistakes (`tests/unit/config/mistakes.txt`) by section."""
    path = Path(__file__).parents[1] / "unit/config/mistakes.txt"
    found: dict[str, list[list[str]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            rows = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            rows.append(line.replace("{file}", __file__).split(" | "))
    return found


def followed(message: str, argv: Sequence[str]) -> list[list[str]]:
    """Return a command line for each remedy of a message; none for words that this does not understand."""
    said = re.sub(rf"--set '?({KEY})=(\[[^\]]*\]|[^\s,?']*)'?", lambda it: " ".join(_words_of(it[1], it[2])), message)
    said = re.sub(rf"({KEY})=\w+", r"\1", said)
    return [_with_set(line) for line in _followed(said, _without_set(argv))]


def _words_of(key: str, text: str) -> list[str]:
    """Return a key and its values as words."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if isinstance(value, list):
        return [key, *map(str, value)]
    return [key, "none" if value is None else text]


def _without_set(argv: Sequence[str]) -> list[str]:
    words: list[str] = []
    sets = False
    for word in argv:
        sets = word == "--set" or (sets and not word.startswith("-"))
        if not sets:
            words.append(word)
        elif word != "--set":
            key, _, text = word.partition("=")
            words += _words_of(key, text)
    return words


def _with_set(words: Sequence[str]) -> list[str]:
    argv: list[str] = []
    place = 0
    while place < len(words):
        option = _of(words[place])
        if option is None or words[place] != option.key:
            argv.append(words[place])
            place += 1
            continue
        end = place + 1
        while end < len(words) and not _begins(words[end]):
            end += 1
        values = words[place + 1 : end] or ["true"]
        text = f"[{', '.join(values)}]" if option.kind.many else values[0]
        argv += ["--set", f"{option.key}={'null' if values == ['none'] else text}"]
        place = end
    return argv


def _begins(word: str) -> bool:
    """Return whether a word is a flag or a key, after which values come."""
    return bool(re.match(r"--?[a-zA-Z]", word)) or any(word == option.key for option in options())


def _followed(message: str, argv: Sequence[str]) -> list[list[str]]:
    if unknown := re.match(rf"unknown option ({FLAG}): (.*)", message):
        names = _names(unknown[2])
        if not names and "--help-all" not in unknown[2]:  # why nothing has to be given here
            return [_without(argv, unknown[1])]
        return [_renamed(argv, unknown[1], words) for words in names]
    if unknown := re.match(r"unknown \w+ (\S+): (?:choose one of|did you mean) ([\w, -]+)", message):
        return [[each if word == unknown[1] else word for word in argv] for each in _listed(unknown[2])]
    if switch := re.match(rf"({FLAG}) takes no value.*: (?:write (.*)|here it is .*)", message):
        instead = _listed(switch[2]) if switch[2] else []
        kept = _without(argv, switch[1])
        return [[*kept, name] for name in instead] or [_renamed(argv, switch[1], _names(message)[0])]
    if wrong := re.match(rf"({FLAG})(?:/{FLAG})* expects (.*?)(, got .*|, but no value follows it)", message):
        return [[*_without(argv, wrong[1]), wrong[1], *each] for each in _expected(wrong[2], wrong[3])]
    if bound := re.match(rf"({FLAG}) ({NUMBER}) must be ((?:[\w ,.*−]|{NUMBER})+)$", message):
        return [_instead(argv, bound[1], bound[2], value) for value in _within(bound[3])]
    return [line for each in _clauses(message) for line in _clause(each, message, argv)]


def followed_in_file(message: str, data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the contents of a file of options after each remedy of a message about a key or a value in it."""
    message = re.sub(r"^--config \S+?: ", "", message)
    if unknown := re.match(r"unknown key (\S+): (.*)", message):
        there = re.search(r"here it is ([\w.]+)(?:: (.*?))?(?:, .*)?$", unknown[2])
        names = [there[1]] if there else [key for (key,) in _names(unknown[2])]
        value = yaml.safe_load(there[2]) if there and there[2] else _value(data, unknown[1]) if names else None
        return [_with(_dropped(data, unknown[1]), key, value) for key in names]
    if wrong := re.match(r"([\w.]+) expects (.*?)(, got .*)", message):
        if "mapping of options" in wrong[2]:
            return [_dropped(data, wrong[1])]
        if written := re.search(r": write (it in \[brackets\]|\[?\{.*)$", wrong[3]):
            value = _value(data, wrong[1]) if written[1].startswith("it") else yaml.safe_load(written[1])
            return [_with(data, wrong[1], value if isinstance(value, list) else [value])]
        values = [yaml.safe_load(value) for (value,) in _expected(wrong[2], wrong[3])]
        listed = "a list of" in wrong[2]
        return [_with(data, wrong[1], [value] if listed and value is not None else value) for value in values]
    return []


def _value(data: Any, key: str) -> Any:
    for name in key.split("."):
        data = data[name]
    return data


def _dropped(data: dict[str, Any], key: str) -> dict[str, Any]:
    name, _, below = key.partition(".")
    rest = {each: value for each, value in data.items() if each != name}
    kept = _dropped(data[name], below) if below else {}
    return {**rest, name: kept} if kept else rest


def _with(data: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    name, _, below = key.partition(".")
    return {**data, name: _with(data.get(name) or {}, below, value) if below else value}


def dead_end(start: T, ask: Callable[[T], object], follow: Callable[[str, T], list[T]]) -> T | None:
    """Return the first line or file that a remedy proposes and that leads nowhere, None if each leads somewhere: advice
    upon it ends with one that `ask` accepts, or with a message that `follow` does not understand.
    """
    message = answer(start, ask)
    assert message is not None
    return next((each for each in follow(message, start) if not _leads_on(each, ask, follow, seen={message})), None)


def _leads_on(start: T, ask: Callable[[T], object], follow: Callable[[str, T], list[T]], *, seen: set[str]) -> bool:
    message = answer(start, ask)
    if message is None or message in seen or len(seen) > STEPS:
        return message is None
    further = follow(message, start)
    return not further or any(_leads_on(each, ask, follow, seen={*seen, message}) for each in further)


def answer(start: T, ask: Callable[[T], object]) -> str | None:
    """Return the message with which a mistake is refused, None if nothing is."""
    try:
        ask(start)
    except UserError as error:
        return str(error)
    return None


def _names(text: str) -> list[list[str]]:
    """Return the words of each option that a hint names."""
    if there := re.search(r"(?:here it is|it is a key: write) ([^,]+)", text):
        return [there[1].split()]
    meant = re.match(r"did you mean (.*)\?", text)
    return [name.split() for name in meant[1].split(" or ")] if meant else []


def _listed(text: str) -> list[str]:
    return re.split(r", (?:or )?| or ", text)


def _of(flag: str) -> Option | None:
    return next((each for each in options() if flag in (each.key, *each.flags, *each.negations)), None)


def _place(argv: Sequence[str], flag: str) -> tuple[int, int]:
    """Return where a flag, by any of its names, and its values begin and end (for the last time) in a command line."""
    option = _of(flag)
    names = (option.key, *option.flags, *option.negations) if option else (flag,)
    found = [place for place, word in enumerate(argv) if word.partition("=")[0] in names]
    if not found:
        return len(argv), len(argv)
    end = found[-1] + 1
    while end < len(argv) and not _begins(argv[end]):
        end += 1
    return found[-1], end


def _without(argv: Sequence[str], flag: str) -> list[str]:
    begin, end = _place(argv, flag)
    shorter = [*argv[:begin], *argv[end:]]
    return _without(shorter, flag) if begin < end else shorter


def _renamed(argv: Sequence[str], flag: str, words: Sequence[str]) -> list[str]:
    """Return a command line with other words for a flag, and its values after them unless they have their own."""
    begin, end = _place(argv, flag)
    given = [*([argv[begin].partition("=")[2]] if "=" in argv[begin] else []), *argv[begin + 1 : end]]
    option = _of(words[0])
    takes_none = option is not None and option.kind.scalar is bool
    return [*argv[:begin], *words, *([] if takes_none or len(words) > 1 else given), *argv[end:]]


def _instead(argv: Sequence[str], flag: str, old: str, new: str) -> list[str]:
    """Return a command line with a number of an option in the place of another."""
    begin, end = _place(argv, flag)
    given = [*([argv[begin].partition("=")[2]] if "=" in argv[begin] else []), *argv[begin + 1 : end]] or [old]
    return [*argv[:begin], *argv[end:], flag, *(new if float(each) == float(old) else each for each in given)]


def _expected(kind: str, got: str) -> Iterator[list[str]]:
    """Yield values of a kind of option, as its message describes it; the one that it suggests, if there is one."""
    kind = kind.removesuffix(" (separated by spaces)")
    if meant := re.search(r"did you mean (.*)\?", got):
        yield from ([each] for each in meant[1].split(" or "))
        return
    if "separated by commas" in got or "separated by spaces" in kind:
        yield re.split(",", got.partition("'")[2].partition("'")[0])
    for each in re.split(r" or (?!false)", kind):
        if choices := re.match(r"(?:one of|a list of any of) (.*)", each):
            yield from ([choice] for choice in choices[1].split(", "))
        else:
            yield [
                {
                    "an integer": "1",
                    "a number": "1e-4",
                    "a list of integers": "8",
                    "a list of texts": "d",
                    "a text": "d",
                    "true or false": "true",
                }.get(each, each)
            ]


def _within(range: str) -> Iterator[str]:
    """Yield numbers that a range has, given in words."""
    lowest = re.search(rf"(at least|greater than|between) ({NUMBER})", range)
    highest = re.search(rf"at most ({NUMBER})", range)
    if highest:
        yield highest[1]
    elif lowest:
        yield lowest[2] if lowest[1] != "greater than" else str(float(lowest[2]) + 0.5)


def _clauses(message: str) -> list[str]:
    """Return the remedies of a message, each an imperative of its own."""
    said = re.sub(r" \([^()]*\)", "", message).rpartition(": ")[2]
    parts = re.split(r",? or (?=leave|use|add|set|give|name|let|start|other|--)|(?<=out), and |; ", said)
    return [f"use {part}" if part.startswith("--") else part.strip(" ,") for part in parts]


def _clause(clause: str, message: str, argv: Sequence[str]) -> Iterator[list[str]]:
    """Yield the command lines that one imperative of a message asks for."""
    named = re.findall(rf"(?<![\w-])({FLAG})", message)
    if left := re.fullmatch(rf"leave ({FLAG}|it|this|one out|one of them) ?(?:out)?", clause):
        both = left[1].startswith("one")
        names = named[:2] if both else named[:1] if left[1] in ("it", "this") else [left[1]]
        yield from (_without(argv, name) for name in names)
    elif numbers := re.fullmatch(rf"(?:use|set it to) ((?:at most )?{NUMBER}(?:(?:, | or ){NUMBER})*)", clause):
        about = re.search(rf"({FLAG}): use", message)
        flag = about[1] if about else named[0]
        begin, _ = _place(argv, flag)
        old = re.search(rf"{flag} ({NUMBER})", message)
        for number in re.findall(NUMBER, numbers[1]):
            if begin < len(argv) and old is not None:
                yield _instead(argv, flag, old[1], number)
            else:
                yield [*_without(argv, flag), flag, number]
    elif "name your data sets with --datasets" in clause:
        yield [*argv, "--datasets", "d"]
    elif zero := re.fullmatch(rf"set (it|{FLAG})(?: and ({FLAG}))? to (?:at most )?({NUMBER})", clause):
        line = list(argv)
        for flag in filter(None, (named[0] if zero[1] == "it" else zero[1], zero[2])):
            line = [*_without(line, flag), flag, zero[3]]
        yield line
    elif processes := re.search(r"torchrun with --nproc-per-node (\d+)", clause):
        yield [*_without(argv, "--nproc-per-node"), "--nproc-per-node", processes[1]]
    elif span := re.fullmatch(rf"use ({NUMBER}) to {NUMBER}", clause):
        yield [*_without(argv, named[0]), named[0], span[1]]
    elif given := re.fullmatch(
        rf"(?:use|add|set|give) ((?:{FLAG}(?: (?!or|to|and)[^\s-][^\s,]*)*(?: or | and | )?)+)", clause
    ):
        for each in given[1].split(" or "):
            words = each.replace(" and ", " ").split()
            known = [word for word in words if _of(word) or word in RUN_FLAGS]
            bare = len(known) == len(words) == 1 and (option := _of(words[0])) and option.kind.scalar is not bool
            if known and not bare:
                line = list(argv)
                for flag in known:
                    line = _without(line, flag)
                yield [*line, *(WORDS.get(word, word.strip("'")) for word in words)]
