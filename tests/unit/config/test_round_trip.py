"""Configurations come back as they were: of files and flags, resolved, changed while a run goes on, and by module."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megavlm.checkpoint.begun import as_begun, changed_options
from megavlm.command_line.parsing import _without_others, parse, recipe
from megavlm.config.optimizer_schema import newton_schulz_flops
from megavlm.config.schema import Config, DatasetConfig, OptimizerConfig, TrainConfig
from megavlm.errors import UserError
from megavlm.families import with_published
from megavlm.rules.check import idle, without_idle
from megavlm.rules.defaults import resolve, with_start_defaults
from megavlm.rules.fields import Kind, Option, options, value_at
from megavlm.rules.load import from_dict, from_yaml_file, to_yaml
from megavlm.rules.training_rules import with_train_iters

PUBLISHED = ("model", "published")
MODELS = ("qwen2_5_vl_7b", "llava_1_5_7b", "qwen3_vl_30b_a3b")  # of model.published, which brings their sizes

# A flag has no white space around names of data sets and columns.
WORD = st.text(st.characters(codec="utf-8", exclude_characters="\0,+:~$"), min_size=1, max_size=5).filter(
    lambda text: text == text.strip()
)
SCALARS: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63) + 1, 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    # No surrogates and no NUL: neither is in a path that a command line can give. What a shell would expand (~, $NAME)
    # is refused.
    str: st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20).filter(
        lambda text: not text.startswith(("~", "$"))
    ),
    DatasetConfig: st.builds(
        DatasetConfig,
        # A path that begins with a dash looks like a flag: it has to be called ./-.
        path=st.text(st.characters(codec="utf-8", exclude_characters="\0,"), max_size=20).map(lambda text: f"/{text}"),
        kind=st.sampled_from(["auto", "llava", "webdataset"]),
        weight=st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False),
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


GIVEN = (
    "--set model.language.num_query_groups=2 model.language.kv_channels=16 model.language.vocab_size=97 "
    "model.projector.hidden_size=24 --lr-decay-style WSD --lr-decay-iters 40 --lr-wsd-decay-iters 7 --data synthetic "
    "--precision bf16 --freeze none --seq-length 128 --lr 2e-3 --lr-warmup-iters 1 --save-interval 5 --train-iters 50 "
    "--eval-interval 0"
).split()
FILLED = {
    "model.language.num_query_groups": 8,
    "model.language.kv_channels": 16,
    "model.freeze": (),
    "model.language.vocab_size": 160,
    "model.projector.hidden_size": 128,
    "precision.dtype": "fp32",
    "train.seq_length": 64,
    "optimizer.lr": 1e-3,
    "optimizer.lr_warmup_iters": 0,
    "checkpoint.save_interval": 0,
    "optimizer.lr_decay_iters": 50,
    "optimizer.lr_wsd_decay_iters": 5,
    "evaluation.eval_interval": 0,
    "data.kind": "files",
}


def test_unset_options_get_the_values_that_their_help_promises() -> None:
    config = parse("--train-iters 50 --lr-decay-style WSD --datasets a.json --validation-split 0.1".split())
    resolved = resolve(config, vocab_size=160)
    changed = {
        option.key: value_at(resolved, option.path)
        for option in options()
        if value_at(resolved, option.path) != value_at(config, option.path)
    }
    assert changed == FILLED
    assert resolve(resolved, vocab_size=99) == resolved
    assert resolve(parse(["--save-interval", "7", "--validation-split", "0.1"])).evaluation.eval_interval == 7


@pytest.mark.parametrize("argv", [GIVEN, [*GIVEN, "--train-iters", "60"]])
def test_given_values_stay(argv: list[str]) -> None:
    assert resolve(parse(argv), vocab_size=160) == parse(argv)


def test_schedules_of_epochs_follow_from_the_number_of_iterations_that_the_data_make() -> None:
    argv = "--epochs 3 --datasets a.json --lr-decay-style WSD --lr-warmup-fraction 0.05".split()
    open_ended = resolve(parse(argv))
    optimizer = open_ended.optimizer
    assert (open_ended.train.train_iters, optimizer.lr_decay_iters, optimizer.lr_wsd_decay_iters) == (None,) * 3
    known = with_train_iters(open_ended, 200)
    assert (known.train.train_iters, known.optimizer.lr_decay_iters) == (200, 200)
    assert (known.optimizer.lr_warmup_iters, known.optimizer.lr_wsd_decay_iters) == (10, 20)
    assert resolve(parse("--lr-warmup-fraction 0.05".split())).optimizer.lr_warmup_iters == 5
    with pytest.raises(UserError, match=r"--epochs 3 makes 20 iterations: --lr-warmup-iters 30 is longer"):
        with_train_iters(resolve(parse([*argv[:4], "--lr-warmup-iters", "30"])), 20)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("1.0e-4", 1e-4), ("1", 1.0), ("'2.5'", 2.5), ("1e3", 1e3)]
)
def test_numbers_in_any_notation(tmp_path: Path, text: str, value: float) -> None:
    lr = from_yaml_file(written(tmp_path, f"optimizer: {{lr: {text}}}")).optimizer.lr
    assert lr == value
    assert type(lr) is float


def test_lists_become_tuples_and_the_rest_keeps_its_default(tmp_path: Path) -> None:
    file = written(tmp_path, "model:\n  freeze:\n  - vision\n  language:\n    num_query_groups: null\n")
    config = from_yaml_file(file)
    assert config.model.freeze == ("vision",)
    assert config.train == TrainConfig()


def test_yaml_follows_the_schema_and_has_no_tags() -> None:
    text = to_yaml(Config())
    assert [line[:-1] for line in text.splitlines() if not line.startswith(" ")] == list(vars(Config()))
    assert "!" not in text
    assert text.isascii()


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(UserError, match="unknown recipe demos: did you mean demo\\?"):
        recipe("demos")


ALIASES = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "b0: &b0 {k0: 1}\n" + "".join(
    f"b{n}: &b{n}\n  <<: [{', '.join([f'*b{n - 1}'] * 9)}]\n  k{n}: 1\n" for n in range(1, 12)
)


@pytest.mark.parametrize("text", [ALIASES, MERGES, "a: &a [*a]\n"], ids=["aliases", "merges", "circle"])
def test_aliases_are_not_expanded_beyond_all_size(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="aliases expanded"):
        from_yaml_file(written(tmp_path, text))


def test_a_file_of_options_is_a_small_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read: .* bytes, more than"):
        from_yaml_file(written(tmp_path, "# \n" * 2**18))
    os.mkfifo(tmp_path / "fifo.yaml")
    with pytest.raises(UserError, match="no regular file"):
        from_yaml_file(tmp_path / "fifo.yaml")


def test_a_password_in_the_name_of_a_file_is_not_told() -> None:
    with pytest.raises(UserError) as refused:
        from_yaml_file("https://user:SECRET@host/run.yaml")
    assert "SECRET" not in str(refused.value)


BEGUN = "--init-from F --datasets a.json --tp 2 --train-iters 100".split()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", None),
        ("--log-interval 5", None),
        ("--lr 2e-5 --gbs 16", "--global-batch-size 16 (before: 8), --lr 2e-05 (before: 1e-05), --vision-lr default"),
        ("--datasets b.json", "--datasets a.json b.json (before: a.json)"),
        ("--train-iters 200 --lr-decay-style constant", "--train-iters 200 (before: 100), --lr-decay-style constant"),
    ],
)
def test_each_changed_option_is_told(tmp_path, capsys, flags, told):
    (tmp_path / "checkpoints/iter_0000005").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(to_yaml(with_start_defaults(parse(BEGUN))))
    as_begun(parse([*BEGUN, "--run-dir", str(tmp_path), *flags.split()]))
    printed = capsys.readouterr().out
    assert (printed == "") if told is None else f"this run goes on with other options: {told}" in printed
    assert "schedule" not in printed


def test_a_new_length_moves_the_schedule() -> None:
    before, longer = parse(BEGUN), parse([*BEGUN, "--train-iters", "200"])
    assert "schedule of the new length" in (changed_options(before, longer) or "")
    fixed = [*BEGUN, "--lr-decay-iters", "100"]
    assert "schedule" not in (changed_options(parse(fixed), parse([*fixed, "--train-iters", "200"])) or "")
    for length, said in (("--epochs", True), ("--train-iters", False)):
        few, many = (parse([length, "2", "--gbs", batch]) for batch in ("8", "16"))
        assert ("more or less than that" in (changed_options(few, many) or "")) is said


def test_flops_are_those_of_the_products() -> None:
    """Five steps of XXᵀ [m, m], its square, and its product with X, at 2 FLOPs a multiplication."""
    options = OptimizerConfig(muon_num_ns_steps=5)
    assert newton_schulz_flops(options, 3584, 18944) == 5 * (2 * 3584**2 * 18944 * 2 + 2 * 3584**3)
    one = replace(options, muon_num_ns_steps=1)
    assert newton_schulz_flops(one, 7, 3) == newton_schulz_flops(one, 3, 7) > 0
