"""Losses over the global batch: any layout has the numbers of one process, and a gradient cache those of no cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.model.vlm import bare_chunk
from megavlm.parallel.groups import random_states, set_random_states
from tests.support import plain_losses
from tests.support.covering import axes_of, covering, pairs, short_and_long, slow
from tests.support.flags import DROPOUT, HALF, MODELS
from tests.support.float64 import float64
from tests.support.plain_losses import Text
from tests.support.pool import Pools
from tests.support.training import SMALL, THREE, assert_resumed, assert_same_curve, metrics, started, train

# Records of two or three texts, of none, one and two images, some of which are the same as another's.
PAIRS = [*SMALL, *"--objective contrastive --seq-length 80 --global-batch-size 8".split()]

# At the default temperature of 0.05 three losses over prefixes are so steep that eight steps in fp32 drift by 2e-5 with
# M-RoPE's model; in float64 the same case is 4e-14 off.
LOSSES = {
    "plain": "--set model.objective.learn_temperature=true",
    "mean": "--temperature 0.2 --set model.objective.learn_temperature=true --pooling mean --set "
    "model.objective.matryoshka_widths=[8,24] model.objective.symmetric=false",
    "sigmoid": "--objective sigmoid",
    "lora": "--lora-rank 4 --freeze vision --set model.objective.learn_temperature=true",
}
# Balance losses that move the gradient norm by per cents, or a bias that moves each step; FP8 by current values.
MODELS = {
    **MODELS,
    "experts": "--num-experts 4 --set model.experts.ffn_hidden_size=24 model.experts.dense_layers=[0] "
    "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01",
    "biased-experts": "--num-experts 8 --set model.experts.ffn_hidden_size=16 model.experts.router_topk=4 "
    "--moe-aux-loss-coeff 0.05 --set model.experts.router_score_function=sigmoid "
    "model.experts.router_enable_expert_bias=true --moe-router-bias-update-rate 0.02",
    "fp8": "--precision bf16 --fp8 hybrid --fp8-parts vision language",
}
LAYOUTS = {
    "tp2": (2, "--tp 2 --micro-batch-size 2"),
    "pp2-vpp2": (2, "--pp 2 --vpp 2"),
    "dp2": (2, ""),
    "zero3": (2, "--data-parallel-sharding full"),
    "zero2": (2, "--data-parallel-sharding optimizer_gradients"),
    "no-zero": (2, "--data-parallel-sharding none"),
    "cp2": (2, "--cp 2"),
    "colocated": (2, "--tp 2 --placement colocated"),
    "tp2-pp2": (4, "--tp 2 --pp 2"),
    "tp2-pp2-vpp2": (4, "--tp 2 --pp 2 --vpp 2"),
    "pp2-vpp2-dp2": (4, "--pp 2 --vpp 2 --overlap-grad-reduce --overlap-param-gather"),
    "dp4": (4, "--micro-batch-size 2"),
    "zb-h1": (2, "--pp 2 --schedule zb-h1"),
    "tp2-dp2-colocated": (4, "--tp 2 --placement colocated --encoder-chunk-patches 20"),
}
OF_EXPERTS = {
    "ep2": (2, "--ep 2 --micro-batch-size 2"),
    "tp2-ep2": (2, "--tp 2 --ep 2"),
    "cp2-ep2": (2, "--cp 2 --ep 2"),
    "tp2-ep2-etp2": (4, "--tp 2 --ep 2 --etp 2"),
    "pp2-vpp2-ep2": (4, "--pp 2 --vpp 2 --ep 2"),
    "ep2-edp2-recompute": (4, "--ep 2 --recompute-granularity full"),
    "tp2-ep2-colocated": (2, "--tp 2 --ep 2 --placement colocated"),
}
LAYOUTS |= OF_EXPERTS
FAST = [
    ("mean", "plain", "tp2"),
    ("mean", "plain", "pp2-vpp2"),
    ("mean", "plain", "dp2"),
    ("mean", "plain", "cp2"),
    ("sigmoid", "plain", "dp2"),
]
SOME_MODELS = ("plain", "rich", "frozen-vision", "qwen3-vl", "recompute", "one-image-rank")
EIGHT = "--train-iters 8".split()


def shows(case: tuple[str, str, str]) -> set[object]:
    """Each loss meets each model, and both meet each axis of a layout."""
    loss, model, layout = case
    return {layout, *pairs([model], [loss], axes_of(LAYOUTS[layout][1]))}


SLOW = covering(
    (
        *(
            (loss, model, layout)
            for loss in LOSSES
            for model in (SOME_MODELS if loss != "lora" else ("plain",))
            for layout in LAYOUTS
            if layout not in OF_EXPERTS
        ),
        *(
            (loss, model, layout)
            for loss in ("plain", "mean", "sigmoid")
            for model in ("experts", "biased-experts")
            for layout in (*OF_EXPERTS, "dp2", "no-zero", "tp2-pp2")
        ),
    ),
    shows,
)


def argv_of(loss: str, model: str) -> list[str]:
    return [*PAIRS, *MODELS[model].split(), *LOSSES[loss].split()]


# In FP8 for three steps: later a code or two round the other way.
IN_FP8 = slow("mean", "fp8", "pp2-vpp2", THREE)


@pytest.mark.parametrize(("loss", "model", "layout", "steps"), [*short_and_long(FAST, SLOW, EIGHT), IN_FP8])
def test_every_layout_gives_the_numbers_of_one_process(pools, alone, tmp_path, loss, model, layout, steps):
    world, flags = LAYOUTS[layout]
    pools(world).run(train, [*argv_of(loss, model), "--no-save", *flags.split(), *steps], str(tmp_path))
    ours, theirs = metrics(tmp_path), alone([*argv_of(loss, model), *steps])
    assert_same_curve(ours, theirs)
    for name in ("balance_loss", "router_z_loss", "expert_load_max", "expert_load_entropy"):
        assert [record.get(name) for record in ours] == [
            pytest.approx(record[name], rel=1e-5) if name in record else None for record in theirs
        ], name


def gradients_with_and_without_a_cache(argv: list[str], run_dir: str) -> dict[str, tuple[float, float]]:
    """Return the loss, and of each parameter the largest gradient, each with its largest difference between a step of
    the schedule and one graph of the whole batch, whose loss is written pair by pair. In float64.
    """
    with float64(), started([*argv, "--data-parallel-sharding", "none"], run_dir) as run:
        engine, batches = run.engine, run.data_loader.next_step().batches
        (chunk,) = engine.chunks
        before = random_states()
        totals = engine.schedule.train(batches)
        cached = {name: param.main_grad.clone() for name, param in chunk.named_parameters()}
        set_random_states(before)
        chunk.zero_grad_buffer()
        vectors, texts, records = [], [], 0
        for batch in batches:
            output = chunk(batch)
            scalars = len(bare_chunk(chunk).parts["output"].learned)
            vectors.append(output[: len(output) - scalars].view(len(batch.text.lengths), -1))
            for record, role, identity, _ in batch.text.members.tolist():
                texts.append(Text(records + record, ("query", "positive", "negative")[role], identity))
            records += 1 + max(batch.text.members[:, 0].tolist())
        options = run.config.model.objective
        losses = plain_losses.info_nce(
            torch.cat(vectors),
            texts,
            scale=output[-1].exp() if scalars else 1 / options.temperature,
            symmetric=options.symmetric,
            widths=(*options.matryoshka_widths, run.config.model.language.hidden_size),
        )
        whole = torch.stack(losses).sum()
        whole.backward()
        found = {"loss": (float(whole), float((whole - totals[0]).abs()))}
        for name, param in chunk.named_parameters():
            off = (param.main_grad - cached[name]).abs().max()
            found[name] = (float(param.main_grad.abs().max()), float(off))
    return found


@pytest.mark.parametrize(
    "flags",
    [
        "--set model.objective.learn_temperature=true",
        f"--pooling mean --set model.objective.matryoshka_widths=[8] {' '.join(DROPOUT)}",
        f"--set model.objective.learn_temperature=true {MODELS['experts']}",
    ],
)
def test_a_gradient_cache_gives_the_gradients_of_the_whole_batch_at_once(pools: Pools, tmp_path: Path, flags: str):
    """With dropout, too: the second pass draws what the first one drew."""
    argv = [*PAIRS, "--no-save", *flags.split()]
    (found,) = pools(1).run(gradients_with_and_without_a_cache, argv, str(tmp_path))
    assert sum(size > 0 for size, _ in found.values()) > 50
    largest = max(size for size, _ in found.values())
    assert all(off <= 1e-7 * largest for _, off in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "model"),
    [
        *(("sigmoid", "plain"), ("plain", "rich"), ("mean", "qwen3-vl")),
        *(("lora", "plain"), ("plain", "biased-experts")),
    ],
)
def test_a_run_resumes_on_another_layout(pools: Pools, alone: Any, tmp_path: Path, loss: str, model: str):
    """Learned temperature, its moments and the place in the data."""
    argv = argv_of(loss, model)
    pools(2).run(train, [*argv, *HALF, "--tp", "2"], str(tmp_path / "half"))
    pools(2).run(train, [*argv, "--pp", "2"], str(tmp_path / "half"))
    assert_same_curve(metrics(tmp_path / "half"), alone([*argv, "--train-iters", "4"]))


@pytest.mark.slow
def test_a_run_with_dropout_resumes_bit_for_bit(pools: Pools, tmp_path: Path):
    argv = [*argv_of("mean", "plain"), *DROPOUT]
    pools(2).run(train, argv, str(tmp_path / "whole"))
    pools(2).run(train, [*argv, *HALF], str(tmp_path / "halves"))
    pools(2).run(train, argv, str(tmp_path / "halves"))
    assert_resumed(metrics(tmp_path / "halves"), metrics(tmp_path / "whole"))
