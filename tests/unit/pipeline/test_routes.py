"""Routes are followed on paper: what every rank would send and receive, without any process."""

import numpy as np
import pytest

from megavlm.pipeline.colocated import feature_exchange_of, senders
from megavlm.pipeline.encoder import shard_size


def follow(routes, held):
    """[M] lists of rows held before → what each rank has after."""
    after = [np.full(route.received, -1) for route in routes]
    for source, route in enumerate(routes):
        for target, places in enumerate(route.send):
            arriving = routes[target].receive[source]
            assert len(arriving) == len(places)
            after[target][arriving] = held[source][places]
    return [list(rows) for rows in after]


@pytest.mark.parametrize(
    ("ranks", "copies", "parts", "count"),
    [(1, 1, 1, 13), (2, 1, 2, 1), (2, 2, 1, 13), (4, 2, 2, 13), (6, 1, 2, 0), (6, 2, 1, 13)],
)
def test_features_reach_who_merges_them_and_gradients_return_once(ranks, copies, parts, count):
    """Each of some shards is merged by some ranks, those after them merge nothing."""
    rng = np.random.default_rng(count)
    owner = rng.integers(0, ranks, size=count)
    shards = rng.integers(0, parts, size=count)
    reads = [*np.repeat(np.arange(parts), copies), *[-1] * (ranks - copies * parts)]
    exchange = feature_exchange_of(owner, shards, reads)

    made = [np.flatnonzero(owner == rank) for rank in range(ranks)]
    merged = follow([exchange.features(rank) for rank in range(ranks)], made)
    for rank, rows in enumerate(merged):
        assert rows == list(np.flatnonzero(shards == reads[rank]))

    routes = [exchange.gradients(rank) for rank in range(ranks)]
    assert follow(routes, [np.array(rows, dtype=int) for rows in merged]) == [list(rows) for rows in made]
    assert sum(len(places) for route in routes for places in route.send) == count


def test_ranks_that_merge_the_same_rows_share_the_sending_of_gradients():
    exchange = feature_exchange_of([0] * 8, np.zeros(8), [0, 0])
    assert [sum(map(len, exchange.gradients(rank).send)) for rank in range(2)] == [4, 4]


@pytest.mark.parametrize(("width", "count"), [(1, 13), (2, 0), (3, 2), (4, 40)])
def test_ranks_of_an_encoder_send_equal_runs_of_its_rows(width, count):
    encoder = np.random.default_rng(count).integers(0, 3, size=count)
    sender = senders(encoder, width=width)
    assert list(sender // width) == list(encoder), "a row is sent by a rank that made it"
    for number in range(3):
        made = np.flatnonzero(encoder == number)
        length = shard_size(len(made), width)
        for rank in range(width):  # what `Encoder.forward` hands out
            run = made[rank * length :][:length]
            assert list(np.flatnonzero(sender == number * width + rank)) == list(run)
