from itertools import product

import pytest

from megavlm.pipeline.images import assign_longest_first


def largest_load(costs, owners, ranks):
    return max(sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks))


def test_the_costliest_go_first_to_the_least_loaded():
    assert assign_longest_first([1, 7, 3, 4, 3], 2) == (1, 0, 1, 1, 0)  # 7 + 3, 4 + 3 + 1


def test_ties_go_in_order_to_lower_ranks():
    assert assign_longest_first([2, 2, 2, 2, 2], 3) == (0, 1, 2, 0, 1)


def test_nothing_and_fewer_items_than_ranks():
    assert assign_longest_first([], 4) == ()
    assert assign_longest_first([5.0], 4) == (0,)


@pytest.mark.parametrize("costs", [(5, 5, 4, 4, 3, 3, 3), (9, 8, 2, 2, 1, 1), (1, 1, 1, 10)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_largest_load_is_within_grahams_bound(costs, ranks):
    best = min(largest_load(costs, owners, ranks) for owners in product(range(ranks), repeat=len(costs)))
    found = largest_load(costs, assign_longest_first(costs, ranks), ranks)
    assert found <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9
