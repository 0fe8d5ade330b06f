"""FP8 on two tensor-parallel ranks: whose largest values scale a tensor is agreed on over NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.model import MODEL
from tests.support.pool import Pools
from tests.support.training import metrics, train


@pytest.fixture
def pools() -> Iterator[Pools]:
    if torch.cuda.device_count() == 1 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        pytest.skip("two ranks need a GPU each, or share one: docs/gpu.md, Layouts on one GPU")
    started = Pools()
    yield started
    started.close()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_fp8_of_two_ranks_learns_as_one_process_does(pools: Pools, recipe: str, tmp_path: Path) -> None:
    """Each rank scales its shard of a weight by itself: losses differ by FP8's rounding, not more."""
    argv = [*MODEL, *f"--precision bf16 --fp8 hybrid --fp8-recipe {recipe} --train-iters 6 --no-save".split()]
    pools(1).run(train, argv, str(tmp_path / "one"))
    pools(2).run(train, [*argv, "--tp", "2"], str(tmp_path / "two"))
    one, two = ([record["loss"] for record in metrics(tmp_path / name)] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-2)
