"""Runs that start from each family's folder stop and go on: bit for bit at their layout, and at another one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.support import hf
from tests.support.gates import hold
from tests.support.pool import Pools
from tests.support.tiny_models import FAMILIES, SINGLE, square
from tests.support.training import assert_same_curve, farthest_apart, metrics, train_composed, without_wall_time

# AdamW's first update is lr · g / (|g| + ε): where g is nearly 0, its rounding, which depends on the layout, would
# become a whole update. An ε far above that rounding bounds it.
RUN = (
    "--precision fp32 --global-batch-size 4 --micro-batch-size 1 --seq-length 48 --lr 1e-3 --lr-decay-iters 20 "
    "--lr-warmup-iters 0 --no-tensorboard --set optimizer.adam_eps=1e-4"
).split()
HALF, WHOLE = "--train-iters 2".split(), "--train-iters 4".split()


@pytest.mark.slow
@pytest.mark.parametrize("family", SINGLE)
def test_a_run_goes_on_at_its_layout_and_at_another(pools: Pools, tmp_path: Path, family: str) -> None:
    torch.manual_seed(2)  # else the weights depend on the tests before
    folder = hf.save(FAMILIES[family][0](), tmp_path / "hf")
    argv = [*RUN, "--init-from", str(folder), "--image-sizes", square(family)]
    four, two = "--tp 2 --pp 2".split(), "--pp 2 --vpp 2".split()
    pools(1).run(train_composed, [*argv, *WHOLE, "--no-save"], str(tmp_path / "one"))
    pools(4).run(train_composed, [*argv, *four, *WHOLE, "--no-save"], str(tmp_path / "whole"))
    pools(4).run(train_composed, [*argv, *four, *HALF], str(tmp_path / "same"))
    shutil.copytree(tmp_path / "same", tmp_path / "other")
    pools(4).run(train_composed, [*argv, *four, *WHOLE], str(tmp_path / "same"))
    pools(2).run(train_composed, [*argv, *two, *WHOLE], str(tmp_path / "other"))

    whole, same = (without_wall_time(metrics(tmp_path / name)) for name in ("whole", "same"))
    differing = [ours for ours, theirs in zip(same, whole, strict=True) if ours != theirs]
    hold(hf.family_in(folder), "resume", len(differing), f"iterations {differing}")
    other, one = metrics(tmp_path / "other"), metrics(tmp_path / "one")
    hold(hf.family_in(folder), "reshard", *farthest_apart(other, one))
    assert_same_curve(other, one)
