"""Connectors as every other layer: behind any cut, recomputed, frozen, cached, resumed at another layout."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.support.covering import fast_and_slow
from tests.support.flags import FOUR, MODELS, TWO
from tests.support.pool import Pools
from tests.support.training import SMALL, THREE, assert_same_curve, metrics, train

CONNECTORS = ("qformer", "perceiver", "adaptive-pool", "c-abstractor")
# Processes, what changes the numbers, and what must not change them.
CASES = {
    "recomputed": (2, "", "--tp 2 --recompute-granularity full"),
    "recomputed-behind-a-frozen-tower": (2, "--freeze vision", "--pp 2 --recompute-granularity full"),
    "frozen": (2, "--freeze projector", "--tp 2"),
    "frozen-encoder": (2, "--freeze vision projector", "--tp 2 --placement colocated --encode-ahead"),
    "cached": (2, "--freeze vision projector", "--pp 2 --placement colocated --vision-cache CACHE"),
    "not-sharded": (2, "", "--tp 2 --no-sequence-parallel --data-parallel-sharding none"),
    "zero3": (2, "", "--data-parallel-sharding full"),
    "cp2": (2, "", "--cp 2"),
    # The list of layers: the patch embedding, three layers of the tower, its norm, the projector, the embedding, …
    "cut-before": (2, "", "--pp 2 --pipeline-cuts 5"),
    "cut-behind": (2, "", "--pp 2 --pipeline-cuts 6"),
    "alone": (4, "", "--pp 4 --pipeline-cuts 4 5 6"),
    "alone-tp2-frozen-tower": (4, "--freeze vision", "--tp 2 --pp 2 --vpp 2 --pipeline-cuts 4 5 6"),
}
FAST = (("recomputed-behind-a-frozen-tower", "perceiver"), ("cached", "c-abstractor"), ("frozen", "adaptive-pool"))


def argv_of(model: str) -> list[str]:
    return [*SMALL, *MODELS[model].split()]


@pytest.mark.parametrize(("case", "model"), fast_and_slow(FAST, product(CASES, CONNECTORS)))
def test_a_connector_gives_the_numbers_of_one_process(pools, alone, tmp_path, case, model):
    world, changes, flags = CASES[case]
    argv = [*argv_of(model), *THREE, "--no-save", *changes.split()]
    more = flags.replace("CACHE", str(tmp_path / "cache")).split()
    pools(world).run(train, [*argv, *more], str(tmp_path))
    assert_same_curve(metrics(tmp_path), alone(argv))


@pytest.mark.parametrize("model", fast_and_slow([], CONNECTORS))
def test_a_connector_goes_on_at_another_layout(pools: Pools, tmp_path: Path, model: str) -> None:
    """Two ranks pad its heads, channels and MLPs; checkpoints hold the model's alone."""
    pools(1).run(train, [*argv_of(model), *FOUR, "--no-save"], str(tmp_path / "one"))
    pools(2).run(train, [*argv_of(model), *FOUR, *TWO, "--lr-decay-iters", "20", "--tp", "2"], str(tmp_path / "many"))
    pools(1).run(train, [*argv_of(model), *FOUR], str(tmp_path / "many"))
    assert_same_curve(metrics(tmp_path / "many"), metrics(tmp_path / "one"))
