"""Options of other trainers point to options that exist, and are never taken for others of a similar spelling."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from megavlm.config.cli import parse
from megavlm.config.elsewhere import ELSEWHERE
from megavlm.config.fields import options
from megavlm.config.load import from_dict, in_yaml
from megavlm.errors import UserError

FLAGS = {flag: option for option in options() for flag in (*option.flags, *option.negations)}
VALUES = {int: "1", float: "0.5", str: "x"}


@pytest.mark.parametrize("meaning", dict.fromkeys(ELSEWHERE.values()))
def test_what_is_named_exists_and_parses(meaning: str) -> None:
    named = set(re.findall(r"--[a-z][a-z0-9-]*", meaning)) - {"--nproc-per-node", "--nnodes"}
    assert named <= set(FLAGS)
    if meaning.startswith("--"):
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
        with pytest.raises(UserError) as caught:
            parse([f"--{field.name}"])
        said = re.search(r"did you mean (\S+)\?", str(caught.value))
        assert said is None or said[1].lstrip("-").replace("-", "_") == field.name


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--num-train-epochs 3", "here it is --epochs"),
        ("--eval_steps 5", "here it is --eval-interval"),
        ("--warmup-ratio 0.1", "here it is --lr-warmup-fraction"),
        ("--learning-rte 1", "did you mean learning-rate? here it is --lr"),
        ("--deepsped x", "did you mean deepspeed? here it is --data-parallel-sharding"),
        ("--zzz 1", "--help-all lists all options"),
        ("--save runs/a", "--save takes no value, got runs/a: here it is --run-dir"),
        ("--packing True", "--packing takes no value, got True: write --packing or --no-packing"),
    ],
)
def test_a_flag_of_another_trainer_is_answered(argv: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(argv.split())
    assert says in str(caught.value)


FILES = {
    "LLaMA-Factory": (
        {
            "model_name_or_path": "m",
            "finetuning_type": "lora",
            "cutoff_len": 9,
            "bf16": True,
            "trust_remote_code": True,
        },
        (
            "model_name_or_path is checkpoint.init_from",
            "cutoff_len is train.seq_length",
            "bf16 is precision.dtype: bf16",
        ),
    ),
    "ms-swift": (
        {"model": "m", "train_type": "lora", "dataset": ["a"], "seed": 1},
        ("model is checkpoint.init_from", "dataset is data.datasets"),
    ),
    "DeepSpeed": (
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}},
        ("zero_optimization is parallel.data_parallel_sharding",),
    ),
    "Transformers": (
        {"per_device_train_batch_size": 2, "num_train_epochs": 3, "learning_rate": 1e-5},
        ("num_train_epochs is train.epochs", "learning_rate is optimizer.lr"),
    ),
}


@pytest.mark.parametrize("trainer", FILES)
def test_a_file_of_another_trainer_is_recognised(trainer: str, tmp_path: Path) -> None:
    data, says = FILES[trainer]
    path = tmp_path / "args.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError) as caught:
        parse(["--config", str(path)])
    assert f" is a file of {trainer}: " in str(caught.value)  # a long path is shortened
    assert all(each in str(caught.value) for each in says)
