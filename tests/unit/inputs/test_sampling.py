"""Which frames of a clip are taken: evenly in time, as many as a rate and a budget allow."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.inputs.video import Budget, Clip, Places, from_first_to_last, from_the_first, in_the_middle, rate_of, taken


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
    assert taken(regular(frames, rate), budget, from_the_first, multiple=2) == expected


def test_frames_at_irregular_intervals_are_even_in_time() -> None:
    times = (*np.arange(0, 1, 0.01), *np.arange(1, 9))  # a hundred frames in the first second, one in each other
    clip = Clip(48, 80, times, rate_of(times, None))
    chosen = [times[number] for number in taken(clip, Budget(fps=1), from_the_first, multiple=2)]
    assert chosen == pytest.approx(range(8), abs=0.6)


@pytest.mark.parametrize(
    ("places", "expected"), [(from_the_first, (0, 3, 6)), (in_the_middle, (1, 5, 8)), (from_first_to_last, (0, 4, 9))]
)
def test_where_frames_are_taken(places: Places, expected: tuple[int, ...]) -> None:
    assert taken(regular(10, 10.0), Budget(fps=3, min_frames=1), places) == expected


def test_the_time_of_a_frame_is_its_number_unless_its_own_contradicts() -> None:
    rounded = Clip(48, 80, (0, 0.033, 0.067, 0.1), 30.0)
    assert [rounded.seconds(number) for number in range(4)] == [number / 30 for number in range(4)]
    irregular = Clip(48, 80, (0, 0.01, 0.02, 9), 1.0)
    assert [irregular.seconds(number) for number in range(4)] == [0, 0.01, 0.02, 9]


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
    st.sampled_from([from_the_first, in_the_middle, from_first_to_last]),
)
def test_any_clip_gives_frames_within_the_budget(gaps, fps, most, multiple, places):
    times = tuple(np.cumsum([0.0, *gaps]).tolist())
    clip = Clip(48, 80, times, rate_of(times, None))
    chosen = taken(clip, Budget(fps=fps, max_frames=most), places, multiple=multiple)
    assert 1 <= len(chosen) <= max(1, min(most, len(times)))
    assert all(before < after for before, after in pairwise(chosen))
    assert chosen[-1] < len(times)
