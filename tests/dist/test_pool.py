"""The processes of tests: one that is stuck is told from one that is slow, and says where it stands."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from megavlm.parallel import groups
from tests.support.pool import Pool, begin


def wait_in_vain() -> None:
    time.sleep(3600)


def work(seconds: float) -> float:
    """Compute until this process has used `seconds` of processor time; return what it has used."""
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass
    return time.process_time() - began


def test_a_rank_that_is_stuck_shows_its_stack_and_a_slow_one_is_waited_for() -> None:
    pool = Pool(1)
    assert pool.run(work, 1.5, timeout=1)[0] >= 1.5
    with pytest.raises(AssertionError, match=r"ranks \[0\] of 1 gave no result.*(?s:.*)in wait_in_vain"):
        pool.run(wait_in_vain, timeout=1)
    assert pool.broken


@pytest.mark.parametrize(
    ("communication", "devices", "eager", "expected"),
    [
        ("gloo", 0, "", "start"),
        ("nccl", 2, "", "start"),
        ("nccl", 1, "", "begin, told: False"),
        ("nccl", 1, "1", "begin, told: True"),
    ],
)
def test_ranks_join_as_the_program_does_unless_they_share_a_gpu(
    communication: str, devices: int, eager: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setenv("MEGAVLM_TEST_EAGER", eager)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(groups, "start", lambda *_, **__: called.append("start"))
    monkeypatch.setattr(groups, "begin", lambda *_, told, **__: called.append(f"begin, told: {told}"))
    begin(SimpleNamespace(communication=communication), SimpleNamespace(world=2))
    assert called == [expected]
