"""Runs that copy their checkpoints to --checkpoint-dir, and go on from there on a new disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megavlm.checkpoint import folders, manifest
from megavlm.rules.load import from_yaml_file
from tests.support.pool import Pools
from tests.support.training import SHALLOW, metrics, of_kind, train, without_wall_time
from tests.support.user_callbacks import train_to_error

TINY = [*SHALLOW, *"--save-interval 2 --keep-checkpoints 1".split()]


@pytest.fixture(scope="module")
def whole(run_once) -> Path:
    return run_once(2, [*TINY, "--train-iters", "6"])


@pytest.mark.slow
def test_a_new_machine_goes_on_where_the_lost_one_was(pools: Pools, whole: Path, tmp_path: Path) -> None:
    """The disk is lost, and the newest copy is damaged: the one before it is taken, then a link to either by --load."""
    store = tmp_path / "store"
    argv = [*TINY, "--keep-checkpoints", "2", "--checkpoint-dir", f"file://{store}"]
    pools(2).run(train, [*argv, "--train-iters", "4"], str(tmp_path / "run"))
    assert [iteration for iteration, _ in folders.complete(store)] == [2, 4]
    assert all(manifest.damage(folder) is None for _, folder in folders.complete(store))
    assert {event["iteration"] for event in of_kind(tmp_path / "run", "upload")} == {2, 4}
    shutil.rmtree(tmp_path / "run")

    damaged = store / "iter_0000004/__1_0.distcp"
    damaged.write_bytes(b"X" + damaged.read_bytes()[1:])
    pools(2).run(train, [*argv, "--train-iters", "6"], str(tmp_path / "run"))
    assert without_wall_time(metrics(tmp_path / "run")) == without_wall_time(metrics(whole))[2:]
    assert "__1_0.distcp is damaged" in of_kind(tmp_path / "run", "damage")[0]["reason"]
    assert [event["iteration"] for event in of_kind(tmp_path / "run", "download")] == [2]
    assert [iteration for iteration, _ in folders.complete(store)] == [4, 6]
    assert all(manifest.damage(folder) is None for _, folder in folders.complete(store))  # 4 is the new one

    argv = [*TINY, "--train-iters", "6", "--load", f"file://{store}/iter_0000004"]
    pools(2).run(train, argv, str(tmp_path / "loaded"))
    assert without_wall_time(metrics(tmp_path / "loaded")) == without_wall_time(metrics(whole))[4:]


def test_refused_options_do_not_replace_those_of_a_fetched_checkpoint(pools: Pools, tmp_path: Path) -> None:
    """Neither on the new disk nor in the store, from where the next start takes the options that are not given."""
    argv = [*TINY, "--checkpoint-dir", f"file://{tmp_path}/store"]
    del argv[(lr := argv.index("--lr")) : lr + 2]
    pools(1).run(train, [*argv, "--train-iters", "2", "--lr", "2e-3"], str(tmp_path / "run"))
    begun = (tmp_path / "store/config.yaml").read_text()
    argv, other = [*argv, "--train-iters", "4"], "--lr 3e-3 --set model.language.num_layers=2".split()
    for _ in range(2):
        ((_, error),) = pools(1).run(train_to_error, [*argv, *other], str(tmp_path / "new"))
        assert "was made with model.language.num_layers" in error
        assert (tmp_path / "store/config.yaml").read_text() == begun
    pools(1).run(train, argv, str(tmp_path / "new"))
    for kept in ("store", "new"):
        assert from_yaml_file(tmp_path / kept / "config.yaml").optimizer.lr == 2e-3


def test_a_place_that_cannot_be_written_is_refused_at_the_start(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    argv = [*TINY, "--train-iters", "2", "--checkpoint-dir", f"file://{tmp_path}/file/below"]
    ((_, error),) = pools(1).run(train_to_error, argv, str(tmp_path / "run"))
    assert "--checkpoint-dir" in error
    assert "rights" in error
    argv = [*TINY, "--train-iters", "2", "--load", f"file://{tmp_path}/nothing"]
    ((_, error),) = pools(1).run(train_to_error, argv, str(tmp_path / "run"))
    assert "no complete checkpoint" in error
