"""Out of memory in one line: the peak by component, and a setting whose estimate fits."""

from __future__ import annotations

from dataclasses import replace

from megavlm.arch.dims import Dims
from megavlm.config.schema import Config
from megavlm.planner.auto import explain, memory_of, peak_line
from megavlm.planner.memory import Memory
from megavlm.rules.defaults import resolve

DIMS = Dims(tp=1, pp=1, vpp=1, dp=2)
GIB = float(2**30)


def with_batch(size: int) -> Config:
    config = Config()
    return replace(config, train=replace(config.train, micro_batch_size=size))


def estimate(config: Config) -> Memory:
    return Memory(weights=10 * GIB, activations=config.train.micro_batch_size * 20 * GIB)


def test_the_line_names_components_and_the_first_setting_that_fits():
    said = peak_line(with_batch(4), DIMS, estimate, rank=3, capacity=55 * GIB)
    assert said == (
        "out of memory on rank 3: the planner estimates a peak of 90.00 GiB of 55.00 GiB (activations 80.00 GiB, "
        "weights 10.00 GiB): use --micro-batch-size 2, with which it estimates 50.00 GiB"
    )
    assert "--micro-batch-size 1, with which it estimates 30.00" in peak_line(
        with_batch(4), DIMS, estimate, rank=3, capacity=31 * GIB
    )


def test_an_estimate_that_was_too_low_still_leads_to_a_smaller_setting():
    assert "--micro-batch-size 1" in peak_line(with_batch(2), DIMS, estimate, rank=0, capacity=None)
    assert "--micro-batch-size 1" in peak_line(with_batch(2), DIMS, estimate, rank=0, capacity=80 * GIB)


def test_where_nothing_helps_the_line_says_so():
    said = peak_line(with_batch(1), DIMS, lambda _: Memory(weights=90 * GIB), rank=0, capacity=80 * GIB)
    assert said.endswith("no single setting fits, so use more devices, and let --plan auto choose the layout")


def test_the_numbers_are_the_planner_s():
    config = resolve(with_batch(4), vocab_size=97)
    said = explain(config, DIMS, rank=0, on_gpu=False, capacity=None)
    assert f"{memory_of(config, DIMS, on_gpu=False)[0].total / GIB:.2f} GiB" in said
    assert "use --" in said
