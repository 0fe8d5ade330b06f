"""A device that is full ends a run with one line, which is written down as its reason."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from megavlm.resilience.events import events
from tests.support.pool import Pools
from tests.support.torchrun import TINY
from tests.support.training import train


def train_until_full(argv: list[str], run_dir: str) -> str:
    """The second step finds no memory; returns the line that ends the run."""
    import torch

    from megavlm.errors import UserError
    from megavlm.train.engine import Engine

    original, steps = Engine.train_step, []

    def step(engine: Engine, *args, **kwargs):
        steps.append(1)
        if len(steps) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(engine, *args, **kwargs)

    with patch.object(Engine, "train_step", step), pytest.raises(UserError) as raised:
        train(argv, run_dir)
    return str(raised.value)


def test_out_of_memory_is_one_line_with_components_and_a_remedy(pools: Pools, tmp_path: Path):
    (line,) = pools(1).run(train_until_full, [*TINY, *"--micro-batch-size 4 --no-save".split()], str(tmp_path))
    assert line.startswith("out of memory on rank 0: the planner estimates a peak of")
    assert "weights" in line
    assert "activations" in line
    assert ": use --micro-batch-size" in line
    assert "\n" not in line
    assert [each["reason"] for each in events(tmp_path) if each["kind"] == "failure"] == [line]
