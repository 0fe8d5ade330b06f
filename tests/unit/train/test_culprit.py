"""Which micro-batch a spike comes from, by norms alone."""

from __future__ import annotations

import pytest

from megavlm.train.hooks.step_guard import DataPlace, standing_out

PIXELS, OUTPUT, GRADIENT = range(3)
LAYERS = 5


def norms(odd: dict[tuple[int, int], float]) -> list[tuple[DataPlace, float]]:
    """Of two replicas with two micro-batches each, of which the second of replica 1 differs by factors of `odd`."""
    return [
        (place, (1.0 + depth) * (odd.get((kind, depth), 1.0) if (replica, micro) == (1, 1) else 1.0 + 0.1 * micro))
        for replica in range(2)
        for micro in range(2)
        for kind in (OUTPUT, GRADIENT)
        for depth in range(LAYERS)
        for place in [DataPlace(kind, depth, micro, rank=replica, replica=replica)]
    ]


def test_a_layer_that_multiplies_gradients_is_where_they_begin_to_stand_out() -> None:
    odd = {(GRADIENT, depth): 1e6 for depth in (3, 4)} | {(GRADIENT, 2): 20.0}
    assert standing_out(norms(odd)) == (DataPlace(GRADIENT, 3, 1, 1, 1), 1e6)


def test_unusual_samples_are_no_layer_s_fault() -> None:
    found = standing_out(norms({(GRADIENT, depth): 40.0 for depth in range(1, LAYERS)}))
    assert found == (DataPlace(GRADIENT, 1, 1, 1, 1), 40.0)


@pytest.mark.parametrize("odd", [{}, {(GRADIENT, depth): 2.0 for depth in range(LAYERS)}])
def test_where_all_micro_batches_are_alike_nobody_is_named(odd: dict[tuple[int, int], float]) -> None:
    assert standing_out(norms(odd)) is None
    assert standing_out([]) is None
