"""Which frames of a clip are taken: evenly in time, as many as a rate and a budget allow."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.data.processors.sampling import Budget, Clip, rate_of, taken


def regular(frames: int, rate: float) -> Clip:
    return Clip(48, 80, tuple(number / rate for number in range(frames)), rate)


@pytest.mark.parametrize(
    ("frames", "rate", "budget", "expected"),
    [
        (60, 30.0, Budget(), (0, 15, 30, 45)),  # two seconds: two frames each
        (75, 30.0, Budget(), (0, 18, 37, 56)),  # 2.5 seconds: 5 frames, rounded down to pairs
        (30, 30.0, Budget(), (0, 7, 15, 22)),  # at least four
        (3, 30.0, Budget(), (0, 1)),  # but no more than there are
        (1, 24.0, Budget(), (0,)),
        (600, 30.0, Budget(max_frames=5), (0, 150, 300, 450)),
        (40, 10.0, Budget(fps=20), tuple(range(40))),  # no frame twice
    ],
)
def test_frames_at_equal_intervals(frames: int, rate: float, budget: Budget, expected: tuple[int, ...]) -> None:
    assert taken(regular(frames, rate), budget, multiple=2) == expected


def test_frames_at_irregular_intervals_are_even_in_time() -> None:
    times = (*np.arange(0, 1, 0.01), *np.arange(1, 9))  # a hundred frames in the first second, one in each other
    clip = Clip(48, 80, times, rate_of(times, None))
    chosen = [times[number] for number in taken(clip, Budget(fps=1), multiple=2)]
    assert chosen == pytest.approx(range(8), abs=0.6)


@pytest.mark.parametrize(
    ("times", "stated", "expected"),
    [
        ((0, 0.033, 0.067, 0.1), 30.0, 30.0),  # time stamps in milliseconds
        ((0, 1, 2, 3), 30.0, 1.0),  # a nominal rate
        ((0, 1, 2, 3), None, 1.0),
        ((0.0,), None, 24.0),
        ((0.0,), 30.0, 30.0),
    ],
)
def test_the_rate_is_the_stated_one_unless_frames_contradict(times: tuple, stated: float, expected: float) -> None:
    assert rate_of(times, stated) == pytest.approx(expected)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(0.001, 30), min_size=1, max_size=60),
    st.floats(0.01, 60),
    st.integers(1, 50),
    st.integers(1, 4),
)
def test_any_clip_gives_frames_within_the_budget(gaps: list[float], fps: float, most: int, multiple: int) -> None:
    times = tuple(np.cumsum([0.0, *gaps]).tolist())
    chosen = taken(Clip(48, 80, times, rate_of(times, None)), Budget(fps=fps, max_frames=most), multiple=multiple)
    assert 1 <= len(chosen) <= max(1, min(most, len(times)))
    assert all(before < after for before, after in pairwise(chosen))
    assert chosen[-1] < len(times)
