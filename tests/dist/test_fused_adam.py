"""Runs in which megatron-core finds a fused Adam, as on a GPU with Transformer Engine or Apex: saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer

from tests.support.covering import slow
from tests.support.flags import DROPOUT
from tests.support.pool import Pools
from tests.support.training import LEAN, metrics, train, without_wall_time


def train_with_fused_adam(argv: list[str], run_dir: str) -> None:
    """As `train`, with megatron-core told what it finds on such a machine."""

    class FusedAdam(torch.optim.AdamW):
        """Takes the arguments of Transformer Engine's, and has the option that it has in a group."""

        def __init__(self, params: Any, *, adam_w_mode: bool, **options: Any) -> None:
            super().__init__(params, **options)
            for group in self.param_groups:
                group["bias_correction"] = adam_w_mode

    with (
        patch.multiple(optimizer, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False),
        patch.multiple(distrib_optimizer, Adam=FusedAdam, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True),
    ):
        train(argv, run_dir)


SHORT = "--train-iters 4 --lr-warmup-iters 1 --lr-decay-iters 4".split()
OFFLOAD = "--offload optimizer"


@pytest.mark.parametrize(
    "flags", [slow("--precision bf16"), slow(f"{OFFLOAD} --precision bf16"), slow("--data-parallel-sharding none")]
)
def test_same_layout_resumes_bit_for_bit(pools: Pools, tmp_path: Path, flags: str) -> None:
    argv = [*LEAN, *DROPOUT, *SHORT, *flags.split()]
    pools(2).run(train_with_fused_adam, argv, str(tmp_path / "whole"))
    pools(2).run(train_with_fused_adam, [*argv, "--train-iters", "2"], str(tmp_path / "halves"))
    pools(2).run(train_with_fused_adam, argv, str(tmp_path / "halves"))
    assert without_wall_time(metrics(tmp_path / "halves")) == without_wall_time(metrics(tmp_path / "whole"))


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_a_fused_adam(pools: Pools, tmp_path: Path) -> None:
    """And the other way round: the same numbers as with one of them from beginning to end."""
    argv = [*LEAN, *SHORT]
    pools(2).run(train, argv, str(tmp_path / "whole"))
    for runs, length in ((train, "1"), (train_with_fused_adam, "3"), (train, "4")):
        pools(2).run(runs, [*argv, "--train-iters", length], str(tmp_path / "parts"))
    assert without_wall_time(metrics(tmp_path / "parts")) == without_wall_time(metrics(tmp_path / "whole"))
