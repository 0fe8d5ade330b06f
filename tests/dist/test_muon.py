"""Muon and Lion: the updates of their papers, at every layout, and going on as if nothing had happened.

Newton-Schulz steps of equal matrices are equal bits, whoever holds which piece. But gradients of layouts differ by the
order of fp32 sums, 1e-7 of them, and the steps make small singular values hundreds of times larger: where a matrix has
them (a tower's values and output layer: attention that is nearly even averages them), 1e-7 becomes 1e-3 of that
direction. In float64 the same runs agree to 1e-12, so that is what most layouts are compared in; megatron-core's and
torch's sharded optimizers know fp32 alone, and are compared with a smaller learning rate, whose updates they see all
the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.covering import axes_of, covering, pairs, short_and_long, slow
from tests.support.flags import HALF, MODELS
from tests.support.float64 import train_in_float64
from tests.support.muon_reference import farthest_from_reference
from tests.support.pool import Pools
from tests.support.training import (
    SMALL,
    TEXT_TO_LEARN,
    THREE,
    assert_same_curve,
    assert_within_a_hundredth,
    metrics,
    train,
)

EIGHT = "--train-iters 8".split()
MUON, LION = "--optimizer muon", "--optimizer lion --lr 1e-4"
SLOWER = "--optimizer muon --lr 1e-4"
EXPERTS = (
    "--num-experts 4 --set model.experts.ffn_hidden_size=24 model.experts.dense_layers=[0] "
    "model.experts.shared_ffn_hidden_size=32"
)
# Heads and widths that two ranks do not divide; a vision head is padding.
UNEVEN = (
    "--set model.language.num_attention_heads=3 model.language.num_query_groups=3 model.language.ffn_hidden_size=50"
)
KNOWN = {**MODELS, "experts": EXPERTS, "uneven": UNEVEN, "lora": "--lora-rank 4 --freeze none"}


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("rich", f"{MUON} --ema-decay 0.9"),
        ("experts", MUON),
        *(slow(model, MUON) for model in ("glm4v", "gemma3", "qwen3-vl", "minicpm-v", "lora")),
        ("plain", LION),
    ],
)
def test_two_steps_are_those_of_the_papers(pools: Pools, tmp_path: Path, model: str, flags: str):
    argv = [*SMALL, "--no-save", *KNOWN[model].split(), *flags.split()]
    (found,) = pools(1).run(farthest_from_reference, argv, str(tmp_path), 2)
    assert len(found) > 10
    name, off = max(found.items(), key=lambda item: item[1])
    assert off < 1e-9, f"{name} is off by {off:.1e} of the way that it went"


# In float64, without sharding: TP, PP, VPP, CP, EP, replicas, encoders colocated and split, padded and shared heads.
FAST = [
    (2, "gemma3", "--pp 2"),
    (4, "uneven", "--tp 2"),
    (2, "padded-heads", "--tp 2 --placement colocated"),
    (4, "experts", "--pp 2 --vpp 2 --ep 2"),
    (2, "plain", "--cp 2 --micro-batch-size 2"),
]
LAYOUTS = [
    (2, "--tp 2 --micro-batch-size 2"),
    (4, "--tp 4"),
    (4, "--pp 4"),
    (4, "--tp 2 --pp 2 --vpp 2"),
    (4, "--tp 2 --cp 2"),
    (4, "--pp 2 --vpp 2 --placement colocated"),
    (4, "--tp 2 --pp 2 --placement colocated --vision-tp 2"),
]
MET = ("--tp", "--pp", "--cp", "--placement")  # by each model
SLOW = [
    *FAST,
    (4, "gemma3", "--tp 2 --pp 2"),
    *covering(
        (
            (world, model, flags)
            for world, flags in LAYOUTS
            for model in KNOWN
            if flags != "--tp 4" or model not in ("uneven", "experts")  # three heads, rows of 24 numbers
        ),
        lambda case: {case[2], *pairs([case[1]], [axis for axis in axes_of(case[2]) if axis in MET])},
    ),
    (4, "experts", "--tp 2 --ep 2 --etp 2"),
    (4, "experts", "--ep 4"),
    (2, "experts", "--tp 2 --etp 1"),
]


@pytest.mark.parametrize(("world", "model", "flags", "steps"), short_and_long(FAST, SLOW, EIGHT))
def test_every_layout_gives_the_numbers_of_one_process(pools, alone, tmp_path, world, model, flags, steps):
    argv = [*SMALL, "--no-save", "--data-parallel-sharding", "none", *KNOWN[model].split(), *MUON.split(), *steps]
    pools(world).run(train_in_float64, [*argv, *flags.split()], str(tmp_path))
    assert_same_curve(metrics(tmp_path), alone(argv, train_in_float64), tolerance=1e-11)


ZERO_2, ZERO_3 = "--data-parallel-sharding optimizer_gradients", "--data-parallel-sharding full"
SHARDED = [
    (2, "rich", SLOWER, ""),
    slow(4, "rich", SLOWER, "--tp 2"),
    (2, "rich", SLOWER, f"{ZERO_3} --placement colocated"),
    (4, "rich", LION, f"--pp 2 --vpp 2 {ZERO_2}"),
    slow(2, "rich", SLOWER, "--offload optimizer"),
    slow(4, "rich", SLOWER, f"--tp 2 {ZERO_3}"),
    slow(2, "rich", SLOWER, f"{ZERO_3} --offload optimizer parameters"),
    slow(4, "rich", SLOWER, "--hybrid-shard-size 2"),
    slow(4, "rich", SLOWER, f"{ZERO_3} --hybrid-shard-size 2"),
    slow(4, "experts", SLOWER, "--ep 2"),
    slow(4, "padded-heads", SLOWER, f"--tp 2 {ZERO_2}"),
    slow(4, "frozen-vision-projector", SLOWER, f"--pp 2 {ZERO_3}"),
    *(slow(4, ("rich", "gemma3")[place % 2], LION, flags) for place, (_, flags) in enumerate(LAYOUTS)),
]


@pytest.mark.parametrize(("world", "model", "optimizer", "flags"), SHARDED)
def test_sharding_gives_the_numbers_of_one_process(pools, alone, tmp_path, world, model, optimizer, flags):
    argv = [*SMALL, *THREE, "--no-save", *KNOWN[model].split(), *optimizer.split()]
    pools(world).run(train, [*argv, *flags.split()], str(tmp_path))
    assert_same_curve(metrics(tmp_path), alone(argv))


def test_another_optimizer_is_refused_on_resume(pools: Pools, tmp_path: Path):
    pools(1).run(train, [*SMALL, *MUON.split(), *HALF], str(tmp_path))
    with pytest.raises(AssertionError, match="was made with --optimizer 'muon', whose state adamw does not have: give"):
        pools(1).run(train, SMALL, str(tmp_path))


@pytest.mark.slow
def test_steps_in_bf16_learn_as_those_in_fp32(pools: Pools, tmp_path: Path):
    for kind in ("fp32", "bf16"):
        argv = [*TEXT_TO_LEARN, *MUON.split(), "--set", f"optimizer.muon_precision={kind}"]
        pools(1).run(train, argv, str(tmp_path / kind))
    assert_within_a_hundredth(*(metrics(tmp_path / kind) for kind in ("bf16", "fp32")))
