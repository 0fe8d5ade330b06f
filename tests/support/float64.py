"""Train in float64: what two layouts then differ by is no rounding of fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.support.training import train


@contextmanager
def float64() -> Iterator[None]:
    """Let `--precision fp32` mean float64 in this process.

    It needs `--data-parallel-sharding none`: megatron-core's distributed optimizer knows no such parameters.
    """
    from megavlm.model import router, specs
    from megavlm.optim import data_parallel

    config, gate = data_parallel.DistributedDataParallelConfig, router.router_gating_linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setitem(specs.DTYPES, "fp32", torch.float64)
        # Gradients are then summed in the type of the parameters.
        summed = {"grad_reduce_in_fp32": False}
        patch.setattr(data_parallel, "DistributedDataParallelConfig", lambda **options: config(**{**options, **summed}))
        patch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
        patch.setattr(router, "router_gating_linear", lambda x, weight, bias, _: gate(x, weight, bias, torch.float64))
        yield


def grouped_mm(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
    """torch's product of the rows of each expert with its weights, which knows no float64."""
    parts = rows.tensor_split(offs[:-1].tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def train_in_float64(argv: Sequence[str], run_dir: str) -> None:
    """Run `train` in float64."""
    with float64():
        train(argv, run_dir)
