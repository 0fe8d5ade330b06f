"""The loop: in which order it calls hooks around steps, which of them ends a run, and what it says at the end."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megavlm.planner.hardware import Rates
from megavlm.train import loop
from megavlm.train.calibration import TimedLayer, fit, predicted
from megavlm.train.hooks.hook import RankHook
from megavlm.train.hooks.order import Hooks

METHODS = ("begin", "on_step_begin", "measure", "on_step_end", "finish")


class Noted(RankHook):
    """Notes its calls, measures one number, and ends the run after a step if it is to."""

    def __init__(self, name: str, calls: list[str], *, ends_after: int = 0, refuses: str | None = None) -> None:
        self.name, self.calls, self.ends_after, self.refuses = name, calls, ends_after, refuses
        self.seen: list[list[str]] = []

    def begin(self) -> None:
        self.calls.append(f"begin {self.name}")

    def on_step_begin(self, iteration: int) -> None:
        self.calls.append(f"on_step_begin {self.name}")

    def judge(self, loss: float, norm: float | None) -> str | None:
        return self.refuses

    def measure(self, step: Any) -> dict[str, float]:
        self.calls.append(f"measure {self.name}")
        return {self.name: float(step.iteration)}

    def on_step_end(self, step: Any) -> None:
        self.calls.append(f"on_step_end {self.name}")
        self.seen.append(sorted(step.record))

    def ends(self, step: Any) -> BaseException | None:
        return ValueError(self.name) if step.iteration == self.ends_after else None

    def finish(self, iteration: int, end: BaseException | None) -> BaseException | None:
        self.calls.append(f"finish {self.name}")
        return end


def hooks_of(*ordered: RankHook) -> Hooks:
    unused: Any = None
    return Hooks(ordered, unused, unused)


def run_of(*, last: int) -> Any:
    config = SimpleNamespace(train=SimpleNamespace(train_iters=last))
    return SimpleNamespace(config=config, position=SimpleNamespace(iteration=0))


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    step = lambda run, iteration, hooks: SimpleNamespace(iteration=iteration, record={"iteration": iteration})  # noqa: E731
    monkeypatch.setattr(loop, "take_step", step)


def test_each_method_is_called_on_all_hooks_before_the_next() -> None:
    calls: list[str] = []
    first, second = Noted("a", calls), Noted("b", calls)
    assert loop._train(run_of(last=1), hooks_of(first, second)) == (1, None)
    forward = [f"{method} {name}" for method in METHODS[:-1] for name in "ab"]
    assert calls == [*forward, "finish b", "finish a"]
    assert first.seen == [["a", "b", "iteration"]], "the record is complete before anybody is told"


def test_the_first_hook_with_a_reason_ends_the_run() -> None:
    calls: list[str] = []
    hooks = hooks_of(Noted("a", calls, ends_after=3), Noted("b", calls, ends_after=2), Noted("c", calls, ends_after=2))
    iteration, end = loop._train(run_of(last=5), hooks)
    assert (iteration, str(end)) == (2, "b")


def test_the_first_refusal_of_a_step_is_heard() -> None:
    hooks = hooks_of(Noted("a", []), Noted("b", [], refuses="a spike"), Noted("c", [], refuses="another"))
    assert hooks.judge(1.0, 2.0) == "a spike"
    assert hooks_of(Noted("a", [])).judge(1.0, None) is None


@pytest.mark.parametrize(
    ("began", "epochs", "said"),
    [
        (0, None, "finished"),
        (79, None, "finished"),
        (80, None, "the checkpoint is of iteration 80 and --train-iters ends at 80; raise --train-iters"),
        (100, 2.0, "the checkpoint is of iteration 100 and --epochs ends at 80; raise --epochs"),
    ],
)
def test_a_run_says_why_it_trained_nothing(began: int, epochs: float | None, said: str) -> None:
    train = SimpleNamespace(train_iters=80, epochs=epochs)
    run: Any = SimpleNamespace(position=SimpleNamespace(iteration=began), config=SimpleNamespace(train=train))
    told = loop._ended(run, max(80, began))
    assert said in told
    assert ("nothing was trained" in told) == (began >= 80)


def drawn(rates: Rates, *, noise: float) -> list[TimedLayer]:
    random = np.random.default_rng(1)
    samples = []
    for products, attention, traffic, calls in random.uniform((1e8, 0, 1e6, 1), (1e10, 2e9, 5e8, 20), (30, 4)):
        layer = TimedLayer(products, attention, traffic, calls, 1.0)
        samples.append(replace(layer, seconds=predicted(layer, rates) * random.uniform(1 - noise, 1 + noise)))
    return samples


def test_exact_times_give_the_rates_back() -> None:
    rates = Rates(6e10, 3e10, 4e9, 1e-4)
    assert vars(fit(drawn(rates, noise=0))) == pytest.approx(vars(rates), rel=1e-6)


def test_what_costs_nothing_is_not_negative() -> None:
    samples = drawn(Rates(6e10, 3e10, 1e18, 0.0), noise=0.05)
    found = fit(samples)
    assert min(vars(found).values()) >= 0
    assert max(abs(predicted(s, found) / s.seconds - 1) for s in samples) < 0.15


def test_attention_is_never_faster_than_products() -> None:
    """Times in which attention seems to cost nothing, as noise makes it: it is products at least."""
    found = fit(drawn(Rates(6e10, 1e18, 4e9, 1e-4), noise=0.05))
    assert found.attention == found.matmul < 1e11


def test_products_are_not_faster_than_the_device() -> None:
    """Times that memory and calls explain whole, as those of a GPU's layers, of which both are proportional."""
    samples = drawn(Rates(1e18, 1e18, 4e9, 1e-4), noise=0)
    assert fit(samples).matmul > 1e14
    found = fit(samples, peak=1e13)
    assert found.matmul <= 1e13
    assert max(abs(predicted(s, found) / s.seconds - 1) for s in samples) < 0.2
