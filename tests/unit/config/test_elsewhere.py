"""Options of other trainers point to options that exist, and are never taken for others of a similar spelling."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest
import yaml

from megavlm.command_line.parsing import parse
from megavlm.errors import UserError
from megavlm.rules.elsewhere import meanings
from megavlm.rules.fields import options
from megavlm.rules.load import from_dict, in_yaml
from tests.support.remedies import answer, followed

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
        with pytest.raises(UserError) as caught:
            parse([f"--{field.name}"])
        said = re.search(r"did you mean (\S+)\?", str(caught.value))
        assert said is None or said[1].lstrip("-").replace("-", "_") == field.name


# What users of another trainer type first, and what it is once each message was followed.
COMMANDS = {
    "ms-swift": (
        "--model m --train_type 8 --dataset a.jsonl --torch_dtype bf16 --num_train_epochs 1 --learning_rate 1e-4 "
        "--per_device_train_batch_size 1 --lora_alpha 32 --target_modules language --freeze_vit true --freeze_llm "
        "false --gradient_accumulation_steps 16 --eval_steps 50 --save_steps 50 --save_total_limit 2 "
        "--logging_steps 5 --max_length 2048 --output_dir out --warmup_ratio 0.05 --dataloader_num_workers 4",
        "--init-from m --datasets a.jsonl --precision bf16 --epochs 1 --lr 1e-4 --mbs 1 --lora-rank 8 --lora-alpha "
        "32 --lora-targets language --freeze vision --gbs 16 --eval-interval 50 --save-interval 50 "
        "--keep-checkpoints 2 --log-interval 5 --seq-length 2048 --run-dir out --lr-warmup-fraction 0.05 "
        "--num-workers 4",
    ),
    "Transformers": (
        "--model_name_or_path m --train_file a.jsonl --validation_file b.jsonl --output_dir out --max_steps 100 "
        "--learning_rate 2e-5 --weight_decay 0.1 --adam_epsilon 1e-6 --max_grad_norm 0.5 --seed 3 --fp16 false "
        "--gradient_checkpointing --report_to wandb --run_name r --warmup_steps 10 --adam_beta2 0.95 --tf32 true "
        "--dataloader_pin_memory false --per_device_eval_batch_size 2 --remove_unused_columns false",
        "--init-from m --datasets a.jsonl --validation b.jsonl --run-dir out --train-iters 100 --lr 2e-5 "
        "--weight-decay 0.1 --adam-eps 1e-6 --clip-grad 0.5 --seed 3 --recompute-granularity full --tracker wandb "
        "--tracker-run-name r --lr-warmup-iters 10 --adam-beta2 0.95 --mbs 2",
    ),
    "Megatron-LM": (
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16 --swiglu "
        "--qk-layernorm --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 8 "
        "--train-iters 10 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 "
        "--data-path a.jsonl --save out --split 0.01 --attention-dropout 0 --hidden-dropout 0 --use-mcore-models "
        "--ckpt-format torch_dist --attention-backend flash --recompute-activations --tokenizer-model t "
        "--eval-iters 5 --decoder-seq-length 512 --log-throughput --distributed-timeout-minutes 60",
        "--tp 2 --sp --data-parallel-sharding optimizer --precision bf16 --set model.language.activation=swiglu "
        "model.language.qk_norm=true model.language.tie_embeddings=false --mbs 1 --gbs 8 --train-iters 10 --lr 1e-4 "
        "--min-lr 1e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1 --datasets a.jsonl --run-dir out "
        "--validation-split 0.01 --attention-dropout 0 --hidden-dropout 0 --recompute-granularity selective "
        "--tokenizer t --eval-iters 5 --seq-length 512 --distributed-timeout-minutes 60",
    ),
}


@pytest.mark.parametrize("trainer", COMMANDS)
def test_a_command_of_another_trainer_becomes_ours(trainer: str) -> None:
    theirs, ours = (shlex.split(words) for words in COMMANDS[trainer])
    seen = []
    while (message := answer(theirs, parse)) is not None:
        assert message not in seen
        seen.append(message)
        theirs = followed(message, theirs)[0]
    assert parse(theirs) == parse(ours)
