"""Ranks that cannot be used wait for the end of the run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megavlm.command_line.parsing import parse
from megavlm.errors import Stopped
from megavlm.resilience import status
from megavlm.resilience.status import read_status, wait_as_spare, write_status
from megavlm.rules.check import usable_world
from tests.support.training import SMALL


@pytest.mark.parametrize(
    ("flags", "launched", "used"),
    [
        ("--spare-ranks --gbs 8", 3, 2),
        ("--spare-ranks --gbs 12", 5, 4),
        ("--spare-ranks --gbs 8 --tp 2", 7, 4),
        ("--spare-ranks --gbs 8 --tp 2", 1, 1),  # refused: TP needs 2
        ("--spare-ranks --gbs 8", 8, 8),
        ("--gbs 8", 3, 3),
        ("--spare-ranks --micro-batch-size 0", 3, 3),
    ],
)
def test_as_many_ranks_train_as_can(flags: str, launched: int, used: int):
    assert usable_world(parse([*SMALL, *flags.split()]), launched) == used


@pytest.mark.parametrize(("state", "raised"), [("finished", None), ("stopped", Stopped), ("failed", SystemExit)])
def test_a_spare_rank_ends_with_the_run_and_not_with_an_earlier_one(
    state: str, raised: type[BaseException] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(status, "_PAUSE", 0.01)
    write_status(tmp_path, state, iteration=3)
    ended: list[BaseException | None] = []

    def wait() -> None:
        try:
            wait_as_spare(tmp_path, before)
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    before = read_status(tmp_path)
    thread = threading.Thread(target=wait)
    thread.start()
    write_status(tmp_path, "running", iteration=3)
    thread.join(0.2)
    assert not ended
    write_status(tmp_path, state, iteration=5)
    thread.join(60)
    assert [type(each) for each in ended] == [type(None) if raised is None else raised]
