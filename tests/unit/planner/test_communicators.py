"""What NCCL's communicators and CUDA's context take of a GPU, as they were measured, and where it is said."""

from __future__ import annotations

import pytest

from megavlm.arch.dims import Dims
from megavlm.command_line.parsing import parse
from megavlm.planner.auto import memory_of
from megavlm.planner.memory import table
from megavlm.rules.defaults import resolve
from tests.support.training import SMALL


@pytest.mark.parametrize(
    ("flags", "dims", "gib"),
    [
        ("", Dims(), 0.54),
        ("", Dims(dp=4), 1.07),  # the world's communicator, and that of the data-parallel ranks
        ("--tp 2 --pp 2", Dims(tp=2, pp=2, dp=2), 1.19),  # TP, PP, DP and a replica
    ],
)
def test_a_gpu_holds_its_context_and_a_communicator_of_each_group(flags: str, dims: Dims, gib: float) -> None:
    config = resolve(parse([*SMALL, "--global-batch-size", "8", *flags.split()]), vocab_size=97)
    on_gpu, on_cpu = (memory_of(config, dims, on_gpu=each) for each in (True, False))
    assert all(each.communicators == pytest.approx(gib * 2**30) for each in on_gpu)
    assert {each.communicators for each in on_cpu} == {0.0}
    assert "communicators" in table(on_gpu)
    assert "communicators" not in table(on_cpu)
