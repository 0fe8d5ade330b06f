"""The rate of each iteration is that of Transformers' schedules; gradients are divided as they are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from megavlm.command_line.parsing import parse
from megavlm.config.schema import OptimizerConfig
from megavlm.optim.chained import LearningRate, divisor_of, learning_rate
from megavlm.optim.elementwise import ElementwiseOptimizer
from megavlm.optim.rules import ELEMENTWISE
from megavlm.optim.stores import HostStore, StateStore
from megavlm.rules.defaults import resolve

PEAK, STEPS = 0.3, 20


def options(style: str, *, steps: int, warmup: int, floor: float = 0.0, wsd: int | None = None) -> OptimizerConfig:
    argv = f"--train-iters {steps} --lr {PEAK} --lr-decay-style {style} --lr-warmup-iters {warmup} --min-lr {floor}"
    more = f" --lr-wsd-decay-iters {wsd}" if wsd else ""
    return resolve(parse((argv + more).split())).optimizer


def of_transformers(style: str, *, warmup: int, floor: float, wsd: int) -> list[float]:
    """The rate with which each step of a run with Transformers' schedule trains."""
    common: dict[str, Any] = {"num_warmup_steps": warmup, "num_training_steps": STEPS}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    if style == "WSD":
        schedule = transformers.get_wsd_schedule(
            optimizer, num_decay_steps=wsd, decay_type="linear", min_lr_ratio=floor / PEAK, **common
        )
    elif style == "cosine":
        schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, min_lr=floor, **common)
    elif style == "linear":
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, **common)
    else:
        schedule = transformers.get_constant_schedule_with_warmup(optimizer, num_warmup_steps=warmup)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 6])
@pytest.mark.parametrize(
    ("style", "floor"),
    [("constant", 0.0), ("linear", 0.0), ("cosine", 0.0), ("cosine", 0.03), ("WSD", 0.0), ("WSD", 0.03)],
)
def test_iterations_train_with_the_rates_of_transformers(style: str, floor: float, warmup: int) -> None:
    """But for the warm-up, which is a step ahead: Transformers' first step has the rate 0."""
    ours = options(style, steps=STEPS, warmup=warmup, floor=floor, wsd=5 if style == "WSD" else None)
    found = [learning_rate(ours, at, peak=PEAK, floor=floor) for at in range(1, STEPS + 1)]
    theirs = of_transformers(style, warmup=warmup, floor=floor, wsd=5)
    assert found[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12)
    # With --min-lr, WSD of Transformers warms up from it.
    assert found[:warmup] == pytest.approx([PEAK * (at + 1) / warmup for at in range(warmup)])
    if not (style == "WSD" and floor):
        assert found[:warmup] == pytest.approx(theirs[1 : warmup + 1])


def test_groups_have_rates_of_their_own() -> None:
    groups: list[dict[str, float]] = [{}, {"max_lr": 0.6, "min_lr": 0.06, "wd_mult": 0.0}]
    schedule = LearningRate(options("linear", steps=4, warmup=0, floor=0.03), SimpleNamespace(param_groups=groups))
    schedule.step(3)
    assert [group["lr"] for group in groups] == pytest.approx([0.03 + 0.5 * 0.27, 0.06 + 0.5 * 0.54])
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    assert schedule.current() == groups[0]["lr"]


def params(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((37, 5), (64,), (3, 3, 3))]


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize(
    ("store", "clip", "tokens"),
    [(StateStore, 0.0, 0), (HostStore, 0.3, 12345), (StateStore, 0.3, 2**25 + 1), (HostStore, 1e6, 1)],
)
def test_one_division_is_two_passes(name: str, store: type[StateStore], clip: float, tokens: int) -> None:
    ours, theirs = params(1), params(1)
    inner = ElementwiseOptimizer(ours, ELEMENTWISE[name], store(), lr=1e-2)
    plain = ElementwiseOptimizer(theirs, ELEMENTWISE[name], lr=1e-2)
    for step in range(3):
        sums = [each * max(tokens, 1) for each in params(2 + step)]
        for p, g in zip(ours, sums, strict=True):
            p.grad = g.clone()
        means = [g / max(tokens, 1) for g in sums]
        norm = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in means])))
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        assert clip != 0.3 or scale < 1, "this one clips"
        for p, g in zip(theirs, means, strict=True):
            p.grad = g * scale
        whole = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in sums])))
        inner.divisor = divisor_of(whole, tokens, clip=clip or float("inf"))
        inner.step()
        plain.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
