"""The estimate of a start: how its parts grow."""

from __future__ import annotations

import pytest

from megavlm.arch.dims import dims_of
from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config
from megavlm.planner.hardware import profile
from megavlm.planner.start_time import start_estimate
from megavlm.resilience.phases import PARTS
from megavlm.rules.defaults import resolve


def configured(*argv: str) -> Config:
    return resolve(parse(["--recipe", "demo", "--mbs", "1", "--gbs", "64", *argv]), vocab_size=160)


def estimate(*argv: str, world: int, resumes: bool = False) -> dict[str, float]:
    config = configured(*argv)
    return {**start_estimate(config, dims_of(config, world=world), profile("cpu"), 0.5, resumes=resumes)}


def test_each_part_follows_its_law() -> None:
    one, two, many = (estimate(world=1), estimate("--pp", "2", "--vpp", "1", world=2), estimate(world=64))
    assert set(one) <= set(PARTS)
    assert two["model"] == one["model"] / 2, "each stage draws its own layers"
    assert estimate("--tp", "2", world=2)["model"] == one["model"], "whole tensors are drawn"
    assert many["rendezvous"] - one["rendezvous"] == pytest.approx(0.063)
    assert many["imports"] == one["imports"]
    assert one["groups"] < two["groups"]


def test_a_resume_reads_what_it_does_not_draw() -> None:
    """14 bytes of a parameter where each rank has all moments, fewer where they are sharded."""
    fresh, again = estimate(world=1), estimate(world=1, resumes=True)
    assert (again["model"], fresh["weights"]) == (0.0, 0.0)
    sharded = estimate("--data-parallel-sharding", "optimizer", world=4, resumes=True)["weights"]
    whole = estimate("--data-parallel-sharding", "none", world=4, resumes=True)["weights"]
    assert whole == pytest.approx(again["weights"])
    assert sharded / whole == pytest.approx((2 + 12 / 4) / 14)
