from __future__ import annotations

from pathlib import Path

import pytest

from megavlm.checkpoint import folders, retention
from megavlm.errors import UserError


def write(root: Path, iteration: int) -> None:
    (folders.prepare(root, iteration) / "data").write_text(str(iteration))
    folders.commit(root, iteration)


def test_newest_complete_counts_and_unfinished_does_not(tmp_path: Path):
    assert folders.newest(tmp_path) is None
    write(tmp_path, 9)
    write(tmp_path, 10)
    folders.prepare(tmp_path, 11)  # the kill came here
    assert folders.newest(tmp_path) == folders.folder_for(tmp_path, 10)
    assert [iteration for iteration, _ in folders.complete(tmp_path)] == [9, 10]


def test_order_is_by_number_not_by_name(tmp_path: Path):
    write(tmp_path, 9_999_999)
    write(tmp_path, 10_000_000)
    assert folders.newest(tmp_path) == folders.folder_for(tmp_path, 10_000_000)


def test_saving_an_iteration_again_replaces_it(tmp_path: Path):
    write(tmp_path, 5)
    (folders.prepare(tmp_path, 5) / "other").write_text("new")
    folders.commit(tmp_path, 5)
    files = {path.name for path in folders.folder_for(tmp_path, 5).iterdir()}
    assert files == {"other", "manifest.json"}


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3]), (2, [2, 3]), (9, [1, 2, 3])])
def test_retention_keeps_the_newest_and_clears_leftovers(tmp_path: Path, keep: int, left: list[int]):
    for iteration in (1, 2, 3):
        write(tmp_path, iteration)
    folders.prepare(tmp_path, 4)
    retention.prune(tmp_path, retention.Keep(keep))
    retention.sweep(tmp_path)
    assert [iteration for iteration, _ in folders.complete(tmp_path)] == left
    assert not list(tmp_path.glob("tmp-*"))


def test_a_user_may_name_a_checkpoint_a_run_or_its_checkpoints(tmp_path: Path):
    write(tmp_path / "checkpoints", 3)
    expected = folders.folder_for(tmp_path / "checkpoints", 3)
    for named in (tmp_path, tmp_path / "checkpoints", expected):
        assert folders.resolve(named) == expected
    with pytest.raises(UserError, match="name a run folder"):
        folders.resolve(tmp_path / "nothing")
