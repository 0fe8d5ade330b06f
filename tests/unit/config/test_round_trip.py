"""Properties: YAML and flags both say any configuration exactly, and nothing but a UserError comes of garbage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megavlm.command_line.parsing import _without_others, parse
from megavlm.config.schema import Config, DatasetConfig
from megavlm.errors import UserError
from megavlm.families import with_published
from megavlm.rules.check import idle, without_idle
from megavlm.rules.fields import Kind, Option, options
from megavlm.rules.load import from_dict, from_yaml_file, to_yaml

PUBLISHED = ("model", "published")
MODELS = ("qwen2_5_vl_7b", "llava_1_5_7b", "qwen3_vl_30b_a3b")  # of model.published, which brings their sizes

# A flag has no white space around names of data sets and columns.
WORD = st.text(st.characters(codec="utf-8", exclude_characters="\0,+:~"), min_size=1, max_size=5).filter(
    lambda text: text == text.strip()
)
SCALARS: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63) + 1, 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    # No surrogates and no NUL: neither is in a path that a command line can give. What begins with ~ is refused.
    str: st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20).filter(
        lambda text: not text.startswith("~")
    ),
    DatasetConfig: st.builds(
        DatasetConfig,
        # A path that begins with a dash looks like a flag: it has to be called ./-.
        path=st.text(st.characters(codec="utf-8", exclude_characters="\0,"), max_size=20).map(lambda text: f"/{text}"),
        kind=st.sampled_from(["auto", "llava", "webdataset"]),
        weight=st.floats(allow_nan=False, allow_infinity=False),
        name=st.none() | WORD,
        columns=st.none() | st.dictionaries(*2 * [WORD], min_size=1),
    ),
}


def values_of(kind: Kind) -> st.SearchStrategy[Any]:
    scalar = st.sampled_from(kind.choices) if kind.choices else SCALARS[kind.scalar]
    if kind.scalar is str and (kind.optional or kind.many):  # an empty text is refused where none or no word says so
        scalar = scalar.filter(bool)
    if kind.many and kind.scalar is str:  # of several words, one that begins with a dash looks like a flag
        scalar = scalar.filter(lambda word: not word.startswith("-"))
    values = st.lists(scalar, max_size=4).map(tuple) if kind.many else scalar
    return st.none() | values if kind.optional else values


@st.composite
def overrides(draw: st.DrawFn) -> dict[Option, Any]:
    """A few options with any value that their type allows."""
    # A name of an extension would be imported.
    known = [option for option in options() if option.key != "run.extension"]
    chosen = draw(st.lists(st.sampled_from(known), unique_by=lambda option: option.key, max_size=12))
    kinds = {each: replace(each.kind, choices=MODELS) if each.path == PUBLISHED else each.kind for each in chosen}
    return {option: draw(values_of(kinds[option]), label=option.key) for option in chosen}


def config_of(values: dict[Option, Any]) -> Config:
    return with_published(Config(), by_path(values))


def by_path(values: dict[Option, Any]) -> dict[tuple[str, ...], Any]:
    return {option.path: value for option, value in values.items()}


def plain(value: Any) -> Any:
    """A value as YAML would hold it."""
    if isinstance(value, DatasetConfig):
        return asdict(value)
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def word_for(value: Any) -> str:
    if isinstance(value, dict):
        return "+".join(f"{name}:{column}" for name, column in value.items())
    if not isinstance(value, DatasetConfig):
        return str(value)
    rest = {key: item for key, item in asdict(value).items() if key != "path" and item is not None}
    return ",".join([value.path, *(f"{key}={word_for(item)}" for key, item in rest.items())])


def words_for(option: Option, value: object) -> list[str]:
    """A command line that says `option` is `value`."""
    if not option.flag:
        text = yaml.safe_dump([plain(value)], default_flow_style=True, allow_unicode=True, width=10**6).strip()
        return ["--set", f"{option.key}={text[1:-1]}"]
    if isinstance(value, bool):
        return [option.flag if value else option.negations[0]]
    if isinstance(value, tuple):
        return [option.flag, *map(word_for, value)]
    unset = "default" if option.kind.many and option.kind.choices else "none"
    return [option.flag, unset] if value is None else [f"{option.flag}={value}"]


def is_none_as_text(value: object) -> bool:
    """The word `none` means None to a flag, so a file of that name has to be called ./none."""
    return isinstance(value, str) and value.lower() == "none"


@settings(deadline=None, max_examples=30)
@given(overrides())
def test_yaml_is_exact(values: dict[Option, Any]) -> None:
    config = config_of(values)
    assert from_dict(yaml.safe_load(to_yaml(config))) == config


@settings(deadline=None, max_examples=30)
@given(overrides())
def test_flags_are_exact(values: dict[Option, Any]) -> None:
    values = {option: value for option, value in values.items() if not is_none_as_text(value) or option.kind.choices}
    argv = [word for option, value in values.items() for word in words_for(option, value)]
    assert parse(argv) == without_idle(config_of(values), by_path(values))


@settings(deadline=None, max_examples=30)
@given(overrides(), overrides())
def test_flags_override_a_file(below: dict[Option, Any], above: dict[Option, Any]) -> None:
    # A published model's name brings sizes, also in place of the file's.
    above = {option: value for option, value in above.items() if option.path != PUBLISHED}
    above = {option: value for option, value in above.items() if not is_none_as_text(value) or option.kind.choices}
    argv = [word for option, value in above.items() for word in words_for(option, value)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megavlm.rules.load.values_in_file", lambda path: by_path(below))
        config = parse(["--config", "a.yaml", *argv])
    # A flag also takes the place of the other option that says the same.
    flags = _without_others(by_path(above))
    # What only the flags leave without effect returns to its default.
    kept = {*flags, *(option.path for option, _ in idle(config_of(below)))}
    assert config == without_idle(with_published(Config(), by_path(below) | flags), kept)


def refusal(read: Callable[[Any], Config], source: object) -> str | None:
    """The line that refuses `source`, or None where it is taken. Any other exception passes through and fails."""
    try:
        assert isinstance(read(source), Config)
    except UserError as error:
        return str(error)
    return None


def is_one_line(text: str) -> bool:
    return text.isprintable() and len(text.splitlines()) == 1


FLAGS = st.sampled_from(
    [
        "--set",
        *(flag for option in options() if option.key != "run.extension" for flag in (*option.flags, *option.negations)),
        *(option.spelled for option in options() if not option.flag),
    ]
)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        FLAGS
        | st.text(max_size=8)
        | st.sampled_from(["--", "-", "none", "1", "-1", "-1e4", "--x=\n", "train.seed=1", "model=[", "a="]),
        max_size=6,
    )
)
@example(["--tp", "--", "2"])
@example(["--tp", "9" * 5000])
@example(["--lr", "nan"])
@example(["--seed", "9" * 30])
def test_any_words_parse_or_are_refused_in_one_line(argv: list[str]) -> None:
    # -h and what begins with it is a question, not a mistake.
    argv = [word for word in argv if not word.startswith(("-h", "--h"))]
    message = refusal(parse, argv)
    assert message is None or is_one_line(message), message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(options()), JSON)
def test_any_value_is_taken_or_refused_in_one_line(option: Option, value: object) -> None:
    data: object = value
    for name in reversed(option.path):
        data = {name: data}
    message = refusal(from_dict, data)
    assert message is None or (is_one_line(message) and option.key in message), message


@settings(deadline=None, max_examples=50)
@given(JSON)
def test_any_data_is_taken_or_refused_in_one_line(data: object) -> None:
    message = refusal(from_dict, data)
    assert data == {} if message is None else is_one_line(message), message


@given(st.binary(max_size=40) | st.text(alphabet="ab:{}[]&*!-? \n'\"#|>%@<0.", max_size=40).map(str.encode))
@settings(deadline=None, max_examples=50)
@example(b"[" * 2000)
@example(b"a: &a {b: *a}")
@example(b"train: !!bool maybe")
@example(b"train: !!timestamp no")
@example(b"train: 2024-99-99")
@example(b"? [a]\n: b")
@example(b"train: {seed: 0x" + b"f" * 5000 + b"}")
@example(b"a: [" + b"&x [" + b"1]]")
def test_any_file_is_taken_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content)
    message = refusal(from_yaml_file, path)
    assert message is None or is_one_line(message), message
