"""Emulated FP8 linears give the products of rounded operands, and the same ones on any number of tensor-parallel ranks;
a run in it learns as one in bf16 does.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megavlm import backend
from megavlm.arch.dims import Dims
from megavlm.parallel.groups import build_groups, destroy_groups
from megavlm.precision.emulated import (
    EmulatedColumnParallelLinear,
    EmulatedRowParallelLinear,
    current_operands,
    delayed_operands,
)
from tests.support.pool import Pools
from tests.support.training import SMALL, TEXT_TO_LEARN, assert_within_a_hundredth, metrics, train

S, K, M = 8, 12, 20  # positions, width, inner width
STEPS = 5


class _Current:
    """Rounds by present values, in plain torch."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.scale = dtype, torch.tensor(1.0)

    def __call__(self, x: Tensor) -> Tensor:
        self.scale = torch.finfo(self.dtype).max / x.abs().max()
        return self.by_scale(x)

    def by_scale(self, x: Tensor) -> Tensor:
        limit = torch.finfo(self.dtype).max
        return (x * self.scale).clamp(-limit, limit).to(self.dtype).float() / self.scale


class _Delayed(_Current):
    """Rounds by the values of three passes before."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.past: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        rounded = self.by_scale(x)
        self.past.append(x.abs().max())
        self.scale = torch.finfo(self.dtype).max / max(self.past[-3:])
        return rounded


def _reference(recipe: str, fp8: str, bias: bool) -> list[list[Tensor]]:
    """One process, plain torch: y = W₂·(W₁·x + b), both products and their gradients by rounded operands."""
    way = {"tensorwise": _Current, "delayed": _Delayed}[recipe]
    round_x, round_1, round_inner, round_2 = (way(torch.float8_e4m3fn) for _ in range(4))
    backward = torch.float8_e5m2 if fp8 == "hybrid" else torch.float8_e4m3fn
    round_grad, round_inner_grad = way(backward), way(backward)
    flat = lambda t: t.flatten(0, 1)  # noqa: E731
    results = []
    for x, first, second, b, grad in map(_numbers, range(STEPS)):
        qx, q1, q2 = round_x(x), round_1(first), round_2(second)
        inner_q = round_inner(F.linear(qx, q1) + (b if bias else 0))
        g2 = round_grad(grad)
        d_inner = g2 @ q2
        g1 = round_inner_grad(d_inner)
        dw2, dw1 = flat(g2).t() @ flat(inner_q), flat(g1).t() @ flat(qx)
        results.append([F.linear(inner_q, q2), g1 @ q1, dw1, dw2, d_inner.sum((0, 1))])
    return results


def _numbers(step: int) -> tuple[Tensor, ...]:
    """x, W₁, W₂, b and y's gradient of a step: they grow beyond the range of the steps before, and shrink again."""
    generator = torch.Generator().manual_seed(step)
    shapes = ((S, 2, K), (M, K), (K, M), (M,), (S, 2, K))
    growth = (1.0, 8.0, 3.0, 0.01, 5.0)[step]
    return tuple(torch.randn(shape, generator=generator) * growth for shape in shapes)


def _emulated(tp: int, sp: bool, recipe: str, fp8: str, bias: bool) -> list[list[Tensor]]:
    """The same by two emulated layers; this rank's part of each tensor, put together again."""
    destroy_groups()
    groups = build_groups(Dims(tp=tp, pp=1, vpp=1, dp=1), tied_owners=(), seed=1, timeout_minutes=30)
    rank = groups.tp.rank()
    config = TransformerConfig(
        num_layers=1, hidden_size=K, num_attention_heads=2, tensor_model_parallel_size=tp, sequence_parallel=sp
    )
    operands = partial(current_operands, fp8, groups.tp)
    if recipe == "delayed":
        operands = partial(delayed_operands, fp8, 3, groups.collection.tp_dp_cp)
    common = {
        "config": config,
        "init_method": lambda w: w,
        "tp_group": groups.tp,
        "is_expert": False,
        "operands": operands,
    }
    one = EmulatedColumnParallelLinear(K, M, bias=bias, gather_output=False, **common)
    two = EmulatedRowParallelLinear(M, K, bias=False, input_is_parallel=True, skip_bias_add=True, **common)
    part = M // tp
    rows = slice(rank * part, (rank + 1) * part)
    share = slice(rank * S // tp, (rank + 1) * S // tp) if sp else slice(None)
    device = backend.activate().device
    results = []
    for step in range(STEPS):
        x, first, second, b, grad = (each.to(device) for each in _numbers(step))
        one.zero_grad()
        two.zero_grad()
        with torch.no_grad():
            one.weight.copy_(first[rows])
            two.weight.copy_(second[:, rows])
            if bias:
                one.bias.copy_(b[rows])
        mine = x[share].clone().requires_grad_()
        y = two(one(mine)[0])[0]
        y.backward(grad[share])
        bias_grad = one.bias.grad if bias else torch.zeros_like(b[rows])
        whole = [_joined(y.detach(), groups, 0 if sp else None), _joined(mine.grad, groups, 0 if sp else None)]
        whole += [_joined(t, groups, dim) for t, dim in ((one.weight.grad, 0), (two.weight.grad, 1), (bias_grad, 0))]
        results.append([each.cpu() for each in whole])
    return results


def _joined(tensor: Tensor, groups, dim: int | None) -> Tensor:
    if dim is None:
        return tensor
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(groups.tp.size())]
    dist.all_gather(parts, tensor, group=groups.tp)
    return torch.cat(parts, dim)


@pytest.mark.parametrize(
    ("tp", "sp", "recipe", "fp8", "bias"),
    [
        (1, False, "tensorwise", "hybrid", True),
        (2, True, "tensorwise", "hybrid", True),
        (2, True, "delayed", "hybrid", True),
        (2, False, "delayed", "e4m3", False),
    ],
)
def test_products_are_of_rounded_operands_at_any_layout(pools, tp, sp, recipe, fp8, bias):
    expected = _reference(recipe, fp8, bias)
    for results in pools(tp).run(_emulated, tp, sp, recipe, fp8, bias):
        for step, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
            for name, one, other in zip(("y", "dx", "dw1", "dw2", "db"), ours, theirs, strict=True):
                if name != "db" or bias:
                    difference = float((one - other).abs().max() / other.abs().max())
                    assert difference < 1e-5, f"{name} of step {step}"


BF16 = [*SMALL, "--no-save", "--precision", "bf16"]
FP8 = [*BF16, *"--fp8 hybrid --first-last-layers-bf16".split()]


def test_a_run_in_fp8_differs_from_bf16_and_learns(pools: Pools, tmp_path: Path) -> None:
    pools(1).run(train, BF16, str(tmp_path / "bf16"))
    pools(1).run(train, FP8, str(tmp_path / "fp8"))
    high, low = metrics(tmp_path / "bf16"), metrics(tmp_path / "fp8")
    assert [record["loss"] for record in low] != [record["loss"] for record in high]
    assert low[-1]["loss"] == pytest.approx(high[-1]["loss"], rel=0.01)


MIXTURE = "--num-experts 4 --set model.experts.ffn_hidden_size=32 --moe-aux-loss-coeff 0.1"
# Layers of two kinds of heads, with experts beside an MLP.
GEMMA4 = (
    f"{MIXTURE} --set model.experts.own_norms=true model.experts.shared_ffn_hidden_size=64 "
    "model.language.window_size=7 model.language.full_attention_layers=[1,4] model.language.kv_channels=16 "
    "model.language.global_kv_channels=32 model.language.global_query_groups=2 model.language.keys_as_values=true "
    "model.language.value_norm=true model.language.layer_scalar=true model.language.qk_norm=true "
    "model.language.post_norms=true model.language.activation=geglu"
)


@pytest.mark.slow
@pytest.mark.parametrize("mixture", [f"{MIXTURE} --recompute-granularity full", GEMMA4], ids=["experts", "gemma4"])
def test_experts_in_fp8_differ_by_its_rounding_alone(pools: Pools, tmp_path: Path, mixture: str) -> None:
    """From bf16, and among layouts, whose ranks join other rows before they are scaled."""
    runs = {"high": (1, "--fp8 none"), "low": (1, "--fp8 hybrid"), "spread": (2, "--fp8 hybrid --ep 2")}
    for name, (world, flags) in runs.items():
        pools(world).run(train, [*BF16, *mixture.split(), *flags.split()], str(tmp_path / name))
    high, low, spread = (metrics(tmp_path / name) for name in runs)
    assert [record["loss"] for record in low] != [record["loss"] for record in high]
    assert [record["loss"] for record in low] == pytest.approx([record["loss"] for record in high], rel=0.01)
    assert [record["loss"] for record in spread] == pytest.approx([record["loss"] for record in low], rel=0.01)


@pytest.mark.slow
def test_200_steps_stay_within_a_hundredth_of_bf16(pools: Pools, tmp_path: Path) -> None:
    """All along: means over 25 steps, of which the last lie close above the entropy of the text."""
    for precision in ("none", "hybrid"):
        pools(1).run(train, [*TEXT_TO_LEARN, "--fp8", precision], str(tmp_path / precision))
    assert_within_a_hundredth(metrics(tmp_path / "hybrid"), metrics(tmp_path / "none"))


def test_what_a_cpu_cannot_emulate_is_one_line(pools: Pools, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="--fp8-recipe blockwise needs Transformer Engine"):
        pools(1).run(train, [*BF16, *"--fp8 hybrid --fp8-recipe blockwise".split()], str(tmp_path / "a"))
