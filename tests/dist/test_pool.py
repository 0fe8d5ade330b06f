"""The processes of tests: one that is stuck is told from one that is slow, and says where it stands."""

from __future__ import annotations

import time

import pytest

from tests.support.pool import Pool


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
