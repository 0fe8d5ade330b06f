"""Out of memory in one line: the peak by component, and a setting whose estimate fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megavlm.arch.dims import Dims
from megavlm.config.schema import Config
from megavlm.planner import auto
from megavlm.planner.memory import Memory
from megavlm.rules.defaults import resolve

DIMS = Dims(tp=1, pp=1, vpp=1, dp=2)
GIB = float(2**30)


def with_batch(size: int) -> Config:
    config = Config()
    return replace(config, train=replace(config.train, micro_batch_size=size))


def said(config: Config, estimate: Callable[[Config], Memory], *, capacity: float | None) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "memory_of", lambda config, dims, on_gpu: (estimate(config),))
        return auto.explain(config, DIMS, rank=3, on_gpu=True, capacity=capacity)


def by_batch(config: Config) -> Memory:
    return Memory(weights=10 * GIB, activations=config.train.micro_batch_size * 20 * GIB)


def test_the_line_names_components_and_the_first_setting_that_fits() -> None:
    assert said(with_batch(4), by_batch, capacity=55 * GIB) == (
        "out of memory on rank 3: the planner estimates a peak of 90.00 GiB of 55.00 GiB (activations 80.00 GiB, "
        "weights 10.00 GiB): use --micro-batch-size 2, with which it estimates 50.00 GiB"
    )
    for size, capacity in (4, 31 * GIB), (2, None), (2, 80 * GIB):  # the latter: an estimate that was too low
        assert "use --micro-batch-size 1, with which it estimates 30.00" in said(
            with_batch(size), by_batch, capacity=capacity
        )
    whatever = said(with_batch(1), lambda _: Memory(weights=90 * GIB), capacity=80 * GIB)
    assert whatever.endswith("no single setting fits, so use more devices, and let --plan auto choose the layout")


def test_the_numbers_are_the_planner_s() -> None:
    config = resolve(with_batch(4), vocab_size=97)
    line = auto.explain(config, DIMS, rank=0, on_gpu=False, capacity=None)
    assert f"{auto.memory_of(config, DIMS, on_gpu=False)[0].total / GIB:.2f} GiB" in line
    assert "use --" in line
