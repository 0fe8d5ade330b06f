"""Which checkpoints are kept, and that none is deleted while it is read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megavlm.checkpoint import folders, retention
from megavlm.checkpoint.retention import Holds, kept


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"newest": 0}, {10, 20, 30, 40, 50}),
        ({"newest": 2}, {40, 50}),
        ({"newest": 1, "every": 20}, {20, 40, 50}),
        ({"newest": 1, "best": 1, "metric": {10: 2.0, 20: 1.0, 30: 1.0, 40: math.nan}}, {30, 50}),
        ({"newest": 1, "best": 9, "metric": {10: math.nan, 99: 0.0}}, {10, 50}),
    ],
)
def test_the_rule(rule: dict[str, object], expected: set[int]) -> None:
    assert kept([30, 10, 20, 50, 40], **rule) == expected  # type: ignore[arg-type]


def write(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        (folders.prepare(root, iteration) / "data").write_text(str(iteration))
        folders.commit(root, iteration)


def left(root: Path) -> list[int]:
    return [iteration for iteration, _ in folders.complete(root)]


def test_a_checkpoint_that_is_held_is_deleted_later(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    holds = Holds()
    assert holds.add(folders.folder_for(tmp_path, 1))
    assert retention.prune(tmp_path, newest=1) == [folders.folder_for(tmp_path, 2)]
    assert left(tmp_path) == [1, 3]
    holds.release()
    retention.prune(tmp_path, newest=1)
    assert left(tmp_path) == [3]


def test_what_is_gone_cannot_be_held(tmp_path: Path) -> None:
    assert not Holds().add(folders.folder_for(tmp_path, 1))


def test_a_newest_checkpoint_that_vanishes_is_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside a run that saves each step and keeps one."""
    from megavlm.backend import activate

    activate()
    from megavlm.checkpoint.restoring import choices_in

    write(tmp_path, 1)
    add, steps = Holds.add, iter(range(2, 5))

    def slowly(self: Holds, folder: Path) -> bool:
        if (step := next(steps, None)) is not None:
            write(tmp_path, step)
            retention.prune(tmp_path, newest=1)
        return add(self, folder)

    monkeypatch.setattr(Holds, "add", slowly)
    # A folder without a summary looks damaged; what counts here is which one is looked at.
    monkeypatch.setattr("megavlm.checkpoint.restoring.first_look", lambda folder: None)
    assert choices_in(tmp_path, Holds()).folders == (folders.folder_for(tmp_path, 4),)
