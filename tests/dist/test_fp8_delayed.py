"""Runs with emulated delayed scaling: their histories resume, reshard and know no layout but data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megavlm.precision.fp8_state import histories
from tests.support.covering import slow
from tests.support.pool import Pools
from tests.support.quantized import E4M3, Quantized, transformer_engine
from tests.support.training import LEAN, assert_same_curve, metrics, started, train, without_wall_time

SAVING = [
    *LEAN,
    *"--precision bf16 --fp8 hybrid --fp8-recipe delayed --set precision.fp8_amax_history_len=3".split(),
    *"--train-iters 4 --set model.language.hidden_size=64".split(),
]


@pytest.fixture(scope="module")
def delayed(run_once) -> Path:
    """Four steps of four micro-batches with delayed scaling, which keeps a checkpoint."""
    return run_once(1, SAVING)


def test_delayed_scaling_resumes_bit_for_bit(pools: Pools, delayed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "halves"
    pools(1).run(train, [*SAVING, "--train-iters", "3"], str(run_dir))
    pools(1).run(train, SAVING, str(run_dir))
    assert without_wall_time(metrics(run_dir)) == without_wall_time(metrics(delayed))


def test_recomputation_remembers_nothing_twice(pools: Pools, delayed: Path, tmp_path: Path) -> None:
    pools(1).run(train, [*SAVING, *"--recompute-granularity full".split()], str(tmp_path))
    for again, once in zip(metrics(tmp_path), metrics(delayed), strict=True):
        assert (again["loss"], again["grad_norm"]) == (once["loss"], once["grad_norm"])


def test_pipelines_scale_as_one_process(pools: Pools, delayed: Path, tmp_path: Path) -> None:
    """A layer sees the same micro-batches in the same order, forward and backward."""
    pools(2).run(train, [*SAVING, *"--pp 2 --vpp 2".split()], str(tmp_path))
    assert_same_curve(metrics(tmp_path), metrics(delayed))


LAYOUTS = [(2, "--cp 2"), slow(4, "--cp 2 --pp 2 --recompute-granularity full")]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_ranks_that_split_rows_scale_by_the_largest_values_of_all(pools, tmp_path, world, layout):
    """The largest values of all ranks exceed those of a rank's own part of a tensor by a third and more."""
    argv = [*SAVING, *layout.split(), "--train-iters", "2"]
    pools(world).run(train, argv, str(tmp_path / "split"))
    pools(1).run(train, [*argv, *"--cp 1 --tp 1 --pp 1".split()], str(tmp_path / "one"))
    ours, theirs = metrics(tmp_path / "split"), metrics(tmp_path / "one")
    assert [record["loss"] for record in ours] == pytest.approx([record["loss"] for record in theirs], rel=1e-3)
    (expected,) = pools(1).run(_resumed_histories, [*argv, *"--cp 1 --tp 1 --pp 1".split()], str(tmp_path / "one"))
    (found,) = pools(1).run(_resumed_histories, [*argv, *"--cp 1 --tp 1 --pp 1".split()], str(tmp_path / "split"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].allclose(tensor, rtol=0.05), name


def _resumed_histories(argv: Sequence[str], run_dir: str) -> dict[str, Tensor]:
    """The histories of a run that has resumed, before it goes on."""
    with started(argv, run_dir) as run:
        return {name: tensor for chunk in run.engine.chunks for name, tensor in histories(chunk).items()}


def test_histories_reshard(pools: Pools, delayed: Path) -> None:
    (one,) = pools(1).run(_resumed_histories, SAVING, str(delayed))
    assert len(one) == 3 * 4 * 4  # layers, linears, history and scale of both directions
    for two in pools(2).run(_resumed_histories, [*SAVING, "--tp", "2"], str(delayed)):
        assert two.keys() == one.keys()
        assert all(two[name].equal(tensor) for name, tensor in one.items())
    history = one["language.layers.1.mlp.linear_fc1.fp8.forward.amax_history"]
    assert history.shape == (3, 3)
    assert history[1:, :2].gt(0).all()


BF16 = [*LEAN, *"--precision bf16 --train-iters 4".split()]
WIDE = [*BF16, *"--fp8 hybrid --first-last-layers-bf16".split()]  # the second layer alone
GATHERED = [*WIDE, "--fp8-param-gather"]
INSIDE = "language.layers.1."
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
IN_FP8 = {f"{INSIDE}{linear}.weight" for linear in LINEARS}


def _trained(argv: Sequence[str], run_dir: str) -> None:
    with transformer_engine():
        train(argv, run_dir)


def _weights(argv: Sequence[str], run_dir: str) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str]]:
    """Of a run as it begins or resumes: weights, this rank's master weights with zeros around, and which are in FP8."""
    with transformer_engine(), started(argv, run_dir) as run:
        (part,) = run.engine.optimizer.chained_optimizers
        weights, masters, in_fp8 = {}, {}, set()
        for name, param in run.engine.chunks[0].module.named_parameters():
            weights[name] = param.detach().dequantize() if isinstance(param, Quantized) else param.detach().clone()
            in_fp8 |= {name} if isinstance(param, Quantized) else set()
            masters[name] = torch.zeros(param.shape)
            if getattr(param, "main_param", None) is not None:  # a frozen one has none
                at = part._get_model_param_range_map(param)["param"]
                masters[name].view(-1)[at.start : at.end] = param.main_param
    return weights, masters, in_fp8


def _rounded(weight: Tensor) -> Tensor:
    scale = 448 / weight.abs().max().float()
    return ((weight.float() * scale).to(E4M3).float() / scale).bfloat16()


@pytest.fixture(scope="module")
def gathered(run_once) -> Path:
    return run_once(2, GATHERED, _trained)


def test_a_run_begins_with_true_master_weights(pools: Pools, tmp_path: Path) -> None:
    """The numbers from the seed, and not what FP8 leaves of them."""
    ((plain, _, none),) = pools(1).run(_weights, WIDE, str(tmp_path / "wide"))
    one, two = pools(2).run(_weights, GATHERED, str(tmp_path / "gathered"))
    assert none == set()
    assert one[2] == two[2] == IN_FP8
    for name, weight in plain.items():
        assert (one[1][name] + two[1][name]).equal(weight.float()), name
        expected = _rounded(weight) if name in IN_FP8 else weight
        assert one[0][name].equal(expected), name
        assert two[0][name].equal(expected), name


def test_a_run_goes_on_with_rounded_weights(pools: Pools, gathered: Path, tmp_path: Path) -> None:
    pools(2).run(_trained, [*WIDE, "--no-save"], str(tmp_path))
    rounded, wide = metrics(gathered), metrics(tmp_path)
    assert [record["loss"] for record in rounded] != [record["loss"] for record in wide]
    for ours, theirs in zip(rounded, wide, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3)


def test_checkpoints_hold_true_weights_that_any_run_resumes(pools: Pools, gathered: Path) -> None:
    """What was trained is exactly there: for a run without the option, and rounded again for one with it."""
    ((weights, masters, none),) = pools(1).run(_weights, WIDE, str(gathered))
    assert none == set()
    for name, weight in weights.items():
        assert weight.equal(masters[name].bfloat16()), name
        assert name not in IN_FP8 or not weight.equal(_rounded(weight))
    one, two = pools(2).run(_weights, GATHERED, str(gathered))
    assert one[2] == two[2] == IN_FP8
    for name, weight in weights.items():
        assert (one[1][name] + two[1][name]).equal(masters[name]), name
        expected = _rounded(weight) if name in IN_FP8 else weight
        assert one[0][name].equal(expected), name
        assert two[0][name].equal(expected), name


def test_a_resumed_run_repeats_an_uninterrupted_one(pools: Pools, gathered: Path, tmp_path: Path) -> None:
    pools(2).run(_trained, [*GATHERED, "--train-iters", "3"], str(tmp_path))
    pools(2).run(_trained, GATHERED, str(tmp_path))
    assert [r["loss"] for r in metrics(tmp_path)] == [r["loss"] for r in metrics(gathered)]


def test_frozen_weights_stay_as_they_are(pools: Pools, tmp_path: Path) -> None:
    frozen = [*GATHERED, *"--fp8-parts language vision --freeze vision --set model.vision.ffn_hidden_size=64".split()]
    frozen += "--no-first-last-layers-bf16 --set model.vision.num_attention_heads=2".split()
    ((_, _, names),) = pools(1).run(_weights, frozen, str(tmp_path))
    assert {name.split(".")[0] for name in names} == {"language"}
