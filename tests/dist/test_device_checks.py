"""Devices that compute or store wrongly are found and named, and looking for them changes nothing."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from megavlm.errors import DeviceFault
from tests.support.faults import Fault, train_with
from tests.support.training import SMALL, of_kind

SHORT = (
    "--lr-warmup-iters 1 --train-iters 4 --no-save --set model.vision.num_layers=1 model.language.num_layers=2".split()
)
COPIES = "--set numerics.check_weight_hash_across_dp_replicas_interval=1".split()


def flip(values: torch.Tensor) -> None:
    """Flip a low bit of the largest number."""
    flat = values.detach().view(-1)
    whole = {4: torch.int32, 2: torch.int16}[values.element_size()]
    flat.view(whole)[flat.abs().argmax()] ^= 1 << 3


def train_or_end(argv: list[str], run_dir: str) -> str:
    return train_with(argv, run_dir, Fault("pixels", ()))


def train_with_a_flipped_bit(argv: list[str], run_dir: str, rank: int, name: str) -> str:
    """A run in which a bit of a weight flips on a rank, between the update of step 2 and step 3."""
    import torch.distributed as dist

    from megavlm.train.engine import Engine

    steps = 0
    train_step = Engine.train_step

    def flipping(self: Engine, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        params = {key: each for chunk in self.model_chunks for key, each in chunk.module.named_parameters()}
        if steps == 3 and dist.get_rank() == rank and name in params:
            flip(params[name].data)
        return train_step(self, *args, **kwargs)

    with patch.object(Engine, "train_step", flipping):
        return train_or_end(argv, run_dir)


THREE = "--global-batch-size 3 --data-parallel-sharding none --images-per-sample 1 0 2".split()
FLIPS = [
    (3, [*THREE], 1, "rank 1 differs from the others in language.norm.weight"),
    (2, "--tp 2".split(), 1, "ranks 0 and 1 differ in language.norm.weight"),
]


@pytest.mark.parametrize(("world", "layout", "rank", "line"), FLIPS)
def test_copies_that_differ_are_named(pools, tmp_path, world, layout, rank, line):
    argv = [*SMALL, *SHORT, *COPIES, *layout]
    ends = pools(world).run(train_with_a_flipped_bit, argv, str(tmp_path), rank, "language.norm.weight")
    assert all(f"iteration 3: {line}" in end for end in ends), ends
    [event] = of_kind(tmp_path, "mismatch")
    assert rank in event["culprits"]
    assert len(event["hosts"]) == 1
    assert DeviceFault.status == 71
