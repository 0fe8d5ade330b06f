from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from megavlm.command_line.parsing import parse
from megavlm.config.schema import OptimizerConfig
from megavlm.optim.chained import LearningRate, learning_rate
from megavlm.rules.defaults import resolve

PEAK, STEPS = 0.3, 20
STYLES = ("constant", "linear", "cosine", "WSD")


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


@given(st.sampled_from(STYLES), st.integers(1, 300), st.integers(0, 300), st.sampled_from([0.0, 0.01]))
def test_every_iteration_trains(style: str, steps: int, warmup: int, floor: float) -> None:
    warmup = min(warmup, steps - 1)
    wsd = min(max(1, steps // 10), steps - warmup) if style == "WSD" else None
    ours = options(style, steps=steps, warmup=warmup, floor=floor, wsd=wsd)
    rates = [learning_rate(ours, at, peak=PEAK, floor=floor) for at in range(1, steps + 1)]
    assert max(rates) == PEAK
    assert all(rate > floor for rate in rates[warmup:]), "the first step of the floor is the one after the decay"
    assert all(rate > 0 for rate in rates)
    after = learning_rate(ours, steps + 1, peak=PEAK, floor=floor)
    assert after == (PEAK if style == "constant" else floor)


def test_groups_have_rates_of_their_own() -> None:
    groups: list[dict[str, float]] = [{}, {"max_lr": 0.6, "min_lr": 0.06, "wd_mult": 0.0}]
    schedule = LearningRate(options("linear", steps=4, warmup=0, floor=0.03), SimpleNamespace(param_groups=groups))
    schedule.step(3)
    assert [group["lr"] for group in groups] == pytest.approx([0.03 + 0.5 * 0.27, 0.06 + 0.5 * 0.54])
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    assert schedule.current() == groups[0]["lr"]
