"""Flags: every option has one, they override recipes and files, and --help and --print-config print and exit."""

from __future__ import annotations

import dataclasses
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]

from megavlm.command_line.parsing import RECIPES, parse
from megavlm.command_line.words import RUN_FLAGS, unexpected
from megavlm.config.option import COMMON_GROUPS
from megavlm.config.registry import Sections, registered
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.rules.check import check
from megavlm.rules.elsewhere import meanings
from megavlm.rules.fields import options
from megavlm.rules.load import from_dict, in_yaml, to_yaml


def leaves(section: Any, prefix: str = "") -> list[str]:
    """Keys of every field, found without the code under test."""
    found = []
    for field in fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Sections):
            for name, each in registered(value.point).items():
                found += [] if each.options is None else leaves(each.options(), f"{prefix}{field.name}.{name}.")
        elif is_dataclass(value):
            found += leaves(value, f"{prefix}{field.name}.")
        else:
            found.append(prefix + field.name)
    return found


def test_every_field_is_an_option() -> None:
    assert sorted(option.key for option in options()) == sorted(leaves(Config()))


def test_every_flag_is_unique() -> None:
    flags = [*RUN_FLAGS, "-h", *(flag for option in options() for flag in (*option.flags, *option.negations))]
    assert [flag for flag, count in Counter(flags).items() if count > 1] == []


@pytest.fixture
def yaml_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {freeze: [vision], language: {num_query_groups: 2}}\n"
        "parallel: {sequence_parallel: true, tensor_model_parallel_size: 2}\nplacement: {pipeline_cuts: [3]}\n"
        "train: {train_iters: 7, seed: 5}\n"
        "checkpoint: {load: elsewhere}\n"
    )
    return str(path)


def test_a_flag_takes_the_place_of_what_a_file_says_in_another_way(yaml_file: str) -> None:
    train = parse(["--config", yaml_file, "--epochs", "2"]).train
    assert (train.epochs, train.train_iters) == (2, None)
    both = ["--config", yaml_file, "--epochs", "2", "--train-iters", "8", "--datasets", "a.json"]
    with pytest.raises(UserError, match="--epochs 2 and --train-iters 8 both say"):
        check(parse(both), world=1)


def test_none_and_nothing_override_values(yaml_file: str) -> None:
    unset = "--freeze --sp none --pipeline-cuts none --load none --set model.language.num_query_groups=null"
    config = parse(["--config", yaml_file, *unset.split()])
    assert config.model.freeze == ()
    assert config.parallel.sequence_parallel is None
    assert config.placement.pipeline_cuts is None
    assert config.checkpoint.load is None
    assert config.model.language.num_query_groups is None
    assert parse(["--config", yaml_file, "--freeze", "none"]).model.freeze == ()
    assert parse(["--config", yaml_file, "--freeze", "default"]).model.freeze is None
    assert parse(["--pipeline-cuts"]).placement.pipeline_cuts == ()


def test_any_option_is_set_by_its_key(yaml_file: str) -> None:
    words = "--set train.seed=6 model.language.num_layers=3 --tp 4 --set model.vision.full_attention_layers=[1,3]"
    config = parse(["--config", yaml_file, *words.split(), "--set", "model.language={qk_norm: true}"])
    assert (config.train.seed, config.train.train_iters) == (6, 7)
    assert config.model.language.num_layers == 3
    assert config.model.language.qk_norm is True
    assert config.model.language.num_query_groups == 2
    assert config.model.vision.full_attention_layers == (1, 3)
    assert config.parallel.tensor_model_parallel_size == 4
    assert from_dict(yaml.safe_load(to_yaml(config))) == config


def test_of_a_flag_and_a_key_the_last_one_counts() -> None:
    assert parse("--seed 1 --set train.seed=2".split()).train.seed == 2
    assert parse("--set train.seed=2 --seed 1".split()).train.seed == 1
    assert parse("--set train.seed=2 train.seed=3".split()).train.seed == 3


def test_data_sets_of_a_repeated_flag_add_up(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {datasets: [{path: c.json}]}\n")
    config = parse(["--config", str(tmp_path / "run.yaml"), "--datasets", "a.json", "--datasets", "b.json,weight=2"])
    assert [(each.path, each.weight) for each in config.data.datasets] == [("a.json", None), ("b.json", 2.0)]


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        ("", (520, 50, 220)),
        ("--train-iters 3", (3, 0, 1)),
        ("--train-iters 1040", (1040, 100, 440)),
        ("--train-iters 52 --lr-warmup-iters 20", (52, 20, 22)),
        ("--train-iters 52 --lr-decay-style constant", (52, 5, None)),
    ],
)
def test_schedules_of_a_recipe_follow_the_length_of_the_run(flags: str, schedule: tuple[int, int, int | None]) -> None:
    config = parse(["--recipe", "demo", *flags.split()])
    check(config, world=1)
    optimizer = config.optimizer
    assert (config.train.train_iters, optimizer.lr_warmup_iters, optimizer.lr_wsd_decay_iters) == schedule


def test_what_a_recipe_says_of_idle_options_gives_way_and_what_a_user_says_does_not() -> None:
    assert parse(["--recipe", "demo"]).evaluation.eval_interval == 200
    given = parse(["--recipe", "demo", "--data", "synthetic", "--set", "evaluation.eval_samples=7"]).evaluation
    assert (given.eval_interval, given.eval_samples) == (None, 7)
    with pytest.raises(UserError, match=r"evaluation\.eval_samples has no effect except on digits"):
        check(parse(["--recipe", "demo", "--data", "synthetic", "--set", "evaluation.eval_samples=7"]), world=1)


@pytest.mark.parametrize("word", ["-1e-4", "-.5e3", "-1e5"])
def test_negative_numbers_in_any_spelling_are_values(word: str) -> None:
    assert parse(["--min-lr", word]).optimizer.min_lr == float(word)


def help_text(flag: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["pretrain_vlm.py", flag])
    with pytest.raises(SystemExit) as stop:
        parse([flag])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_all_lists_all_flags_with_defaults(capsys, monkeypatch):
    text = help_text("--help-all", 1000, capsys, monkeypatch)  # nothing wraps
    for option in options():
        assert all(flag in text for flag in (*option.flags, *option.negations)), option.key
        assert f"\n{option.section}:\n" in text or not option.flag
        assert option.help in text or not option.flag
    for name in RECIPES:
        assert name in text.split("Recipes:")[1]
    assert "Random seed of weights, data order and dropout. (default: 1234)" in text
    assert "how often. (default: on)" in text
    assert "Whole model (folder, hub name, URL); default: none." in text
    assert "  Parts to freeze; default: none, LoRA: those without adapters.\n" in text
    assert "\n  --tensor-model-parallel-size, --tp N  Number" in text
    assert "\n  --precision {fp32,bf16,fp16}|none  Type" in text


def test_help_keys_lists_all_options_without_flags(capsys, monkeypatch):
    text = help_text("--help-keys", 1000, capsys, monkeypatch)
    for option in options():
        assert bool(option.flag) != (f"  {option.path[-1]}=" in text and option.help in text), option.key
    assert "\nmodel.language:\n  num_layers=N  Layers of the language model. (default: 4)" in text
    assert "\n  qk_norm=BOOL  Apply RMSNorm to queries and keys per head. (default: false)\n" in text
    assert "\n  mrope_section=[N, …]  M-RoPE" in text


def test_help_lists_the_common_options_by_task(capsys, monkeypatch):
    text = help_text("--help", 100, capsys, monkeypatch)
    listed = set(re.findall(r"^  (--[a-z0-9-]+)", text, flags=re.MULTILINE)) - set(RUN_FLAGS)
    assert listed == {min(option.flags, key=len) for option in options() if option.common}
    assert [line[:-1] for line in text.splitlines() if re.fullmatch(r"[a-z ]+:", line)] == ["run", *COMMON_GROUPS]


@pytest.mark.parametrize(("flag", "most"), [("--help", 80), ("--help-all", 450), ("--help-keys", 450)])
def test_help_is_short(flag, most, capsys, monkeypatch):
    lines = help_text(flag, 80, capsys, monkeypatch).splitlines()
    assert len(lines) <= most
    if flag == "--help":  # one screen; a name of the others may be longer than a line
        assert max(map(len, lines)) <= 80


def test_every_help_line_is_a_sentence_that_explains_a_missing_default() -> None:
    for option in options():
        assert option.help.endswith("."), option.key
        assert option.default not in (None, ()) or "default:" in option.help.lower(), option.key


def test_print_config_prints_what_config_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["--tp", "2", "--lr", "3e-5", "--freeze", "vision"]
    with pytest.raises(SystemExit) as stop:
        parse([*argv, "--print-config"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert from_dict(yaml.safe_load(text)) == parse(argv)
    path = tmp_path / "printed.yaml"
    path.write_text(text)
    assert parse(["--config", str(path)]) == parse(argv)


def test_a_mistake_prints_nothing_and_never_exits(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--tp"], ["--recipe"], ["--tp", "x"], ["--nope"], ["stray"], ["--dry-run=true"], ["--freeze", "all"]):
        with pytest.raises(UserError):
            parse(argv)
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_stops_early_ends_the_program_quietly() -> None:
    """As `pretrain_vlm.py --dry-run | head` does: no BrokenPipeError."""
    words = [sys.executable, str(Path(__file__).parents[3] / "pretrain_vlm.py"), *"--recipe demo --dry-run".split()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == -signal.SIGPIPE


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("--lora-alpha 16", "--lora-rank 16"),
        ("--set optimizer.muon_momentum=0.95", r"optimizer\.muon_momentum has no effect without --optimizer muon"),
        ("--ep 1 --vpp 1 --lora-rank 0", None),
        ("--lora-rank 8 --lora-alpha 16", None),
        ("--lora-alpha 16 --lora-alpha 8", "--lora-rank 16"),
    ],
)
def test_a_flag_that_says_a_default_has_to_have_an_effect_too(flags: str, remedy: str | None) -> None:
    """`--lora-alpha 16` alone is meant to train adapters; that 16 is the default must not train everything instead."""
    if remedy is None:
        parse(flags.split(), complete=lambda config: config)
        return
    with pytest.raises(UserError, match=remedy):
        parse(flags.split(), complete=lambda config: config)


def test_a_model_may_give_a_flag_its_effect() -> None:
    def with_adapters(config: Config) -> Config:
        return replace(config, lora=replace(config.lora, rank=8))

    assert parse(["--lora-alpha", "16"], complete=with_adapters).lora.rank == 0


FLAGS = {flag: option for option in options() for flag in (*option.flags, *option.negations)}
KEYS = {option.key: option for option in options()}
VALUES = {int: "1", float: "0.5", str: "x"}


@pytest.mark.usefixtures("one_parser")
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


@pytest.mark.usefixtures("one_parser")
def test_no_field_of_transformers_is_taken_for_an_option_of_another_meaning() -> None:
    transformers = pytest.importorskip("transformers")
    for field in dataclasses.fields(transformers.TrainingArguments):
        said = re.search(r"did you mean (\S+)\?", unexpected([f"--{field.name}"], [f"--{field.name}"]))
        assert said is None or said[1].lstrip("-").replace("-", "_") == field.name
