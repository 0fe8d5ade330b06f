"""Runs with emulated delayed scaling: their histories resume, reshard and know no layout but data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from tests.support.covering import slow
from tests.support.pool import Pools
from tests.support.training import LEAN, assert_same_curve, metrics, started, train, without_wall_time

SAVING = [
    *LEAN,
    *"--precision bf16 --fp8 hybrid --fp8-recipe delayed --set precision.fp8_amax_history_len=3".split(),
    *"--train-iters 4 --set model.language.hidden_size=64".split(),
]


@pytest.fixture(scope="module")
def delayed(run_once) -> Path:
    """Four steps of four micro-batches with delayed scaling, which keeps a checkpoint."""
    return run_once(1, SAVING)


def test_delayed_scaling_resumes_bit_for_bit(pools: Pools, delayed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "halves"
    pools(1).run(train, [*SAVING, "--train-iters", "3"], str(run_dir))
    pools(1).run(train, SAVING, str(run_dir))
    assert without_wall_time(metrics(run_dir)) == without_wall_time(metrics(delayed))


def test_recomputation_remembers_nothing_twice(pools: Pools, delayed: Path, tmp_path: Path) -> None:
    pools(1).run(train, [*SAVING, *"--recompute-granularity full".split()], str(tmp_path))
    for again, once in zip(metrics(tmp_path), metrics(delayed), strict=True):
        assert (again["loss"], again["grad_norm"]) == (once["loss"], once["grad_norm"])


def test_pipelines_scale_as_one_process(pools: Pools, delayed: Path, tmp_path: Path) -> None:
    """A layer sees the same micro-batches in the same order, forward and backward."""
    pools(2).run(train, [*SAVING, *"--pp 2 --vpp 2".split()], str(tmp_path))
    assert_same_curve(metrics(tmp_path), metrics(delayed))


LAYOUTS = [(2, "--cp 2"), slow(4, "--cp 2 --pp 2 --recompute-granularity full")]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_ranks_that_split_rows_scale_by_the_largest_values_of_all(pools, tmp_path, world, layout):
    """The largest values of all ranks exceed those of a rank's own part of a tensor by a third and more."""
    argv = [*SAVING, *layout.split(), "--train-iters", "2"]
    pools(world).run(train, argv, str(tmp_path / "split"))
    pools(1).run(train, [*argv, *"--cp 1 --tp 1 --pp 1".split()], str(tmp_path / "one"))
    ours, theirs = metrics(tmp_path / "split"), metrics(tmp_path / "one")
    assert [record["loss"] for record in ours] == pytest.approx([record["loss"] for record in theirs], rel=1e-3)
    (expected,) = pools(1).run(_resumed_histories, [*argv, *"--cp 1 --tp 1 --pp 1".split()], str(tmp_path / "one"))
    (found,) = pools(1).run(_resumed_histories, [*argv, *"--cp 1 --tp 1 --pp 1".split()], str(tmp_path / "split"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].allclose(tensor, rtol=0.05), name


def _resumed_histories(argv: Sequence[str], run_dir: str) -> dict[str, Tensor]:
    """The histories of a run that has resumed, before it goes on."""
    from megavlm.precision.fp8_state import histories
    from megavlm.train.loop import close

    run = started(argv, run_dir)
    found = {name: tensor for chunk in run.engine.chunks for name, tensor in histories(chunk).items()}
    close(run)
    return found


def test_histories_reshard(pools: Pools, delayed: Path) -> None:
    (one,) = pools(1).run(_resumed_histories, SAVING, str(delayed))
    assert len(one) == 3 * 4 * 4  # layers, linears, history and scale of both directions
    for two in pools(2).run(_resumed_histories, [*SAVING, "--tp", "2"], str(delayed)):
        assert two.keys() == one.keys()
        assert all(two[name].equal(tensor) for name, tensor in one.items())
    history = one["language.layers.1.mlp.linear_fc1.fp8.forward.amax_history"]
    assert history.shape == (3, 3)
    assert history[1:, :2].gt(0).all()
