"""Which steps are bad, by numbers alone."""

from __future__ import annotations

import json
import math
import re

import pytest

from megavlm.resilience.bad_steps import LEAST, WINDOW, BadSteps, iterations


def steps(count: int, norm: float = 1.0, factor: float = 10.0) -> BadSteps:
    found = BadSteps(factor)
    for _ in range(count):
        found.good(norm)
    return found


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_bad_even_where_fp16_overflowed(loss: float) -> None:
    assert BadSteps(0).reason(loss, None) == f"the loss is {loss}"
    assert BadSteps(0).reason(1.0, loss) == f"the gradient norm is {loss}"
    assert BadSteps(0).reason(1.0, None) is None


def test_a_spike_is_beyond_the_factor_times_the_median_of_enough_steps() -> None:
    assert steps(LEAST - 1).reason(1.0, 1e9) is None
    assert steps(LEAST).reason(1.0, 10.0) is None
    assert "10.1 times the median of the last 16 steps" in str(steps(LEAST).reason(1.0, 10.1))
    assert steps(LEAST, factor=0.0).reason(1.0, 1e30) is None
    assert steps(LEAST, norm=0.0).reason(1.0, 1.0) is None, "batches without trained tokens say nothing"


def test_the_median_follows_good_steps_alone() -> None:
    found = steps(WINDOW)
    for _ in range(WINDOW // 2 + 1):
        found.good(100.0)
    assert found.reason(1.0, 900.0) is None
    for _ in range(WINDOW):
        found.bad()
    assert found.reason(1.0, 900.0) is None
    assert (found.in_a_row, found.skipped) == (WINDOW, WINDOW)
    found.left_out()
    assert found.in_a_row == WINDOW
    found.good(1.0)
    assert (found.in_a_row, found.skipped) == (0, WINDOW + 1)


def test_a_checkpoint_keeps_what_is_decided_by() -> None:
    found = steps(40, norm=0.1)
    found.bad()
    other = BadSteps(10.0)
    other.load_state_dict(json.loads(json.dumps(found.state_dict())))
    assert other == found
    other.load_state_dict({})
    assert other == BadSteps(10.0)


def test_going_back_counts_what_is_left_out_and_the_bad_steps_in_a_row() -> None:
    found = steps(20)
    state = found.state_dict()
    for norm in (2.0, 3.0):
        found.good(norm)
    found.bad()
    found.go_back(state, left_out=3)
    assert (list(found.norms), found.in_a_row, found.skipped) == ([1.0] * 20, 1, 3)


def test_iterations_are_numbers_and_ranges() -> None:
    assert iterations(("12", "40-42,7", "9-9")) == {12, 40, 41, 42, 7, 9}
    assert iterations(()) == frozenset()


@pytest.mark.parametrize("text", ["0", "-3", "5-3", "a", "1-2-3", "4-", "1.5", "²"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        iterations((text,))
