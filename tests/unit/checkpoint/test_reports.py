"""What the writer of rank 0 asks of the file system while it waits for 1,023 others, and when it commits."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from megavlm.checkpoint import folders, writer
from megavlm.checkpoint.manifest import FileSum
from megavlm.checkpoint.staging import SaveError, Written

RANKS = 1024
COUNTED = ("listdir", "scandir", "stat", "lstat", "fsync", "open")


def waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports_at: Callable[[int], float]) -> Any:
    """Wait for ranks that report when a fake clock says so, commit, and return the calls of each kind and the seconds.

    Each rank has two files of tensors. A rank that reports at infinity writes nothing, ever.
    """
    folder, reports = tmp_path / "tmp-1", writer.Reports(tmp_path / "reports")
    folder.mkdir()
    sums = {rank: {f"__{rank}_{number}.distcp": FileSum(0, 0) for number in range(2)} for rank in range(RANKS)}
    for name in (name for of_rank in sums.values() for name in of_rank):
        (folder / name).touch()
    now, counts, open_now = [0.0], Counter[str](), list[bool]()
    waiting = sorted((reports_at(rank), rank) for rank in range(RANKS))

    def pass_by(seconds: float) -> None:
        now[0] += seconds
        open_now.append(True)  # what the others do is not counted
        while waiting and waiting[0][0] <= now[0]:
            rank = waiting.pop(0)[1]
            reports.leave(rank, Written([], sums[rank]), None)
        open_now.pop()

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += not open_now
            return function(*args, **kwargs)

        return counting

    pass_by(0.0)
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: now[0])
        patched.setattr(time, "sleep", pass_by)
        for name in COUNTED:
            patched.setattr(os, name, counted(name))
        written = reports.of_all(RANKS, folder, lambda: None)
        while_waiting, seconds = counts.copy(), now[0]
        all_sums = {name: each for of_rank in written for name, each in of_rank.sums.items()}
        folders.commit(folder, folders.folder_for(tmp_path, 1), all_sums, attempt="a")
    return while_waiting, counts - while_waiting, seconds


def test_a_save_of_many_ranks_takes_few_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing a second, a look at what is silent each 30 s; the commit flushes what it writes, and two folders."""
    waiting, commit, seconds = waited(tmp_path, monkeypatch, lambda rank: 100.0 if rank % 64 == 1 else rank / 100)
    assert seconds <= 102
    assert waiting["listdir"] <= seconds + 5
    assert waiting["stat"] + waiting["lstat"] <= 3 * 2 * 16, "only files of the 16 ranks that are late"
    assert commit["fsync"] <= 3
    assert (waiting + commit).total() <= 0.3 * RANKS, "beside one read of each report"


def test_ranks_that_write_nothing_more_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = {7, 900}
    with pytest.raises(SaveError, match=r"the writers of ranks \[7, 900\] wrote nothing for 120 s"):
        waited(tmp_path, monkeypatch, lambda rank: float("inf") if rank in late else 0.0)
