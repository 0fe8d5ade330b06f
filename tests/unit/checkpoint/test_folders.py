"""Which folders are checkpoints, which of them are kept, and that none is deleted while it is read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megavlm.checkpoint import folders
from megavlm.checkpoint.folders import Holds, Keep, kept
from megavlm.checkpoint.manifest import SUMMARY
from megavlm.errors import UserError
from tests.support.manifests import committed


def write(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        committed(root, iteration, {"data": str(iteration)})


def test_newest_complete_counts_and_unfinished_does_not(tmp_path: Path):
    assert folders.newest(tmp_path) is None
    write(tmp_path, 9)
    write(tmp_path, 10)
    (tmp_path / "tmp-iter_0000011").mkdir()  # the kill came here
    assert folders.newest(tmp_path) == folders.folder_for(tmp_path, 10)
    assert [iteration for iteration, _ in folders.complete(tmp_path)] == [9, 10]


def test_order_is_by_number_not_by_name(tmp_path: Path):
    write(tmp_path, 9_999_999, 10_000_000)
    assert folders.newest(tmp_path) == folders.folder_for(tmp_path, 10_000_000)


def test_saving_an_iteration_again_replaces_it(tmp_path: Path):
    write(tmp_path, 5)
    committed(tmp_path, 5, {"other": "new"})
    assert {path.name for path in folders.folder_for(tmp_path, 5).iterdir()} == {"other", "manifest.json"}


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3]), (2, [2, 3]), (9, [1, 2, 3])])
def test_retention_keeps_the_newest_and_clears_leftovers(tmp_path: Path, keep: int, left: list[int]):
    write(tmp_path, 1, 2, 3)
    (tmp_path / "tmp-iter_0000004").mkdir()
    folders.prune(tmp_path, Keep(keep))
    folders.sweep(tmp_path)
    assert [iteration for iteration, _ in folders.complete(tmp_path)] == left
    assert not list(tmp_path.glob("tmp-*"))


def test_a_user_may_name_a_checkpoint_a_run_or_its_checkpoints(tmp_path: Path):
    write(tmp_path / "checkpoints", 3)
    expected = folders.folder_for(tmp_path / "checkpoints", 3)
    for named in (tmp_path, tmp_path / "checkpoints", expected):
        assert folders.resolve(named) == expected
    with pytest.raises(UserError, match="name a run folder"):
        folders.resolve(tmp_path / "nothing")


LOSSES = {10: 2.0, 20: 1.0, 30: 1.0, 40: math.nan, 99: 0.0}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Keep(0), {10, 20, 30, 40, 50}),
        (Keep(2), {40, 50}),
        (Keep(1, every=20), {20, 40, 50}),
        (Keep(1, best="loss"), {30, 50}),
        (Keep(1, best="loss", mode="max"), {10, 50}),
    ],
)
def test_the_rule(rule: Keep, expected: set[int]) -> None:
    assert kept([30, 10, 20, 50, 40], rule, LOSSES) == expected


def test_the_best_survives_until_there_is_a_better_one(tmp_path: Path) -> None:
    """By what each checkpoint says of itself; one that says nothing is not the best."""
    for iteration, metrics in ((1, {"loss": 3.0}), (2, {"loss": 1.0}), (3, {"loss": 2.0}), (4, {}), (5, None)):
        summary = {} if metrics is None else {"metrics": metrics}
        committed(tmp_path, iteration, {SUMMARY: json.dumps(summary)})
        folders.prune(tmp_path, Keep(1, best="loss"))
        assert left(tmp_path) == sorted({min(iteration, 2), iteration})


def left(root: Path) -> list[int]:
    return [iteration for iteration, _ in folders.complete(root)]


def test_a_checkpoint_that_is_held_is_deleted_later(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    holds = Holds()
    assert holds.add(folders.folder_for(tmp_path, 1))
    assert folders.prune(tmp_path, Keep(1)) == [folders.folder_for(tmp_path, 2)]
    assert left(tmp_path) == [1, 3]
    holds.release()
    folders.prune(tmp_path, Keep(1))
    assert left(tmp_path) == [3]


def test_what_is_gone_cannot_be_held(tmp_path: Path) -> None:
    assert not Holds().add(folders.folder_for(tmp_path, 1))


def test_links_and_files_in_the_place_of_checkpoints_do_not_fail_a_save(tmp_path: Path) -> None:
    """A checkpoint that was moved to another disk and linked is unlinked, and what has a new one's name makes way."""
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    committed(root, 1, {"file": "x"})
    (root / "iter_0000002").write_text("in the way")
    committed(root, 2, {"file": "x"})
    assert (root / "iter_0000002" / "file").read_text() == "x"
    (root / "iter_0000001").rename(elsewhere)
    (root / "iter_0000001").symlink_to(elsewhere)
    assert folders.prune(root, Keep(newest=1)) == [root / "iter_0000001"]
    folders.sweep(root)
    assert [path.name for path in root.iterdir()] == ["iter_0000002"]
    assert (elsewhere / "file").exists()
