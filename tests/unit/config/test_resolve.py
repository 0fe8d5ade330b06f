"""Defaults that follow from other options are filled in once."""

from __future__ import annotations

import pytest

from megavlm.command_line.parsing import parse
from megavlm.errors import UserError
from megavlm.rules.defaults import resolve
from megavlm.rules.fields import options, value_at
from megavlm.rules.training_rules import with_train_iters

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
