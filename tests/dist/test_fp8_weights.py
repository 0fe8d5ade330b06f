"""Weights that are kept in FP8 (`--fp8-param-gather`), with stand-ins for Transformer Engine's tensors and layers: what
the optimizer gathers, what checkpoints hold, and who reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.pool import Pools
from tests.support.quantized import E4M3, Quantized, transformer_engine
from tests.support.training import LEAN, metrics, started, train

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
    from megavlm.train.loop import close

    with transformer_engine():
        run = started(argv, run_dir)
        (part,) = run.engine.optimizer.chained_optimizers
        weights, masters, in_fp8 = {}, {}, set()
        for name, param in run.engine.chunks[0].module.named_parameters():
            weights[name] = param.detach().dequantize() if isinstance(param, Quantized) else param.detach().clone()
            in_fp8 |= {name} if isinstance(param, Quantized) else set()
            masters[name] = torch.zeros(param.shape)
            if getattr(param, "main_param", None) is not None:  # a frozen one has none
                at = part._get_model_param_range_map(param)["param"]
                masters[name].view(-1)[at.start : at.end] = param.main_param
        close(run)
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
