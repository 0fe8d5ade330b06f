"""Options of other trainers point to options that exist, and are never taken for others of a similar spelling."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest
import yaml

from megavlm.command_line.parsing import parse
from megavlm.command_line.words import unexpected
from megavlm.rules.elsewhere import meanings
from megavlm.rules.fields import options
from megavlm.rules.load import from_dict, in_yaml

pytestmark = pytest.mark.usefixtures("one_parser")

FLAGS = {flag: option for option in options() for flag in (*option.flags, *option.negations)}
KEYS = {option.key: option for option in options()}
VALUES = {int: "1", float: "0.5", str: "x"}


def test_what_is_named_exists_and_parses() -> None:
    for meaning in dict.fromkeys(meanings().values()):
        check_meaning(meaning)


def check_meaning(meaning: str) -> None:
    named = set(re.findall(r"--[a-z][a-z0-9-]*", meaning)) - {"--nproc-per-node", "--nnodes"}
    assert named <= {*FLAGS, "--set"}
    if meaning.startswith("--set "):
        key, _, value = meaning.partition(",")[0].removeprefix("--set ").partition("=")
        kind = KEYS[key].kind
        sample = "[1]" if kind.many else kind.choices[0] if kind.choices else VALUES.get(kind.scalar, "x")
        parse(["--set", f"{key}={value or sample}"])
        assert in_yaml(meaning.partition(",")[0]).partition(": ") == (key, ": " if value else "", value)
    elif meaning.startswith("--"):
        words = shlex.split(meaning.partition(",")[0])
        kind = FLAGS[words[0]].kind
        given = words[1:] or (
            []
            if kind.scalar is bool or kind.many
            else [kind.choices[0] if kind.choices else VALUES.get(kind.scalar, "x")]
        )
        parse([words[0], *given])
        key, _, value = in_yaml(meaning.partition(",")[0]).partition(": ")
        assert key == FLAGS[words[0]].key
        if value:
            data: object = yaml.safe_load(value)
            for name in reversed(key.split(".")):
                data = {name: data}
            from_dict(data)


def test_no_field_of_transformers_is_taken_for_an_option_of_another_meaning() -> None:
    transformers = pytest.importorskip("transformers")
    for field in dataclasses.fields(transformers.TrainingArguments):
        said = re.search(r"did you mean (\S+)\?", unexpected([f"--{field.name}"], [f"--{field.name}"]))
        assert said is None or said[1].lstrip("-").replace("-", "_") == field.name
