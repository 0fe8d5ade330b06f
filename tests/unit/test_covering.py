"""A cover shows all that its cases show, with fewer of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import covering, pairs

CASES = st.lists(st.tuples(*3 * [st.integers(0, 4)]), unique=True, max_size=60)


def shows(case: tuple[int, ...]) -> set[tuple[object, object]]:
    return pairs(*([(place, value)] for place, value in enumerate(case)))


@given(CASES)
def test_nothing_that_a_case_shows_is_lost(cases: list[tuple[int, ...]]) -> None:
    cover = covering(cases, shows)
    assert cover == [case for case in cases if case in cover]
    assert set().union(*map(shows, cover)) == set().union(*map(shows, cases))


def test_a_cover_of_pairs_is_far_smaller_than_the_product() -> None:
    assert len(covering([(a, b, c) for a in range(5) for b in range(5) for c in range(5)], shows)) < 40
