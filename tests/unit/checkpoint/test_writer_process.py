"""The process that writes checkpoints leaves alone what it has inherited from its rank, and makes room for a save."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megavlm.backend.host_copies import SharedMemory
from megavlm.checkpoint import manifest, saving, writer
from megavlm.checkpoint.folders import Keep
from megavlm.checkpoint.staging import SaveError


class Owned:
    """A cycle that only its own process may free, as a process group with threads."""

    def __init__(self) -> None:
        self.owner, self.cycle = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os._exit(9)


def test_it_frees_nothing_that_its_rank_no_longer_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "do", lambda *_: print(gc.collect()))
    monkeypatch.setattr(writer, "replace", lambda job, **_: job)
    context, memory = multiprocessing.get_context("fork"), SharedMemory()
    ours, theirs = context.Pipe()
    gc.collect()
    gc.disable()
    try:
        Owned()
        pulse = context.RawValue("d", time.monotonic())
        process = context.Process(target=saving._serve, args=(theirs, ours, pulse, memory.file))
        process.start()
    finally:
        gc.enable()
    theirs.close()
    ours.send(SimpleNamespace(memory=0, metadata=None))
    assert ours.poll(30), process.exitcode
    assert ours.recv() is None
    ours.close()
    process.join(30)
    assert process.exitcode == 0
    memory.close()


def test_what_a_killed_save_left_makes_room_before_the_next_one_writes(tmp_path: Path, monkeypatch: Any) -> None:
    """And nothing else: other ranks may already write their parts of this save."""
    for name in ("tmp-iter_0000002-a", "tmp-reports-0000002-a", "tmp-iter_0000004-b", "iter_0000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__1_0.distcp").touch()
    there: list[str] = []

    def full(*_: Any, **__: Any) -> Any:
        there.extend(sorted(path.name for path in tmp_path.iterdir()))
        raise SaveError("the disk is full")

    monkeypatch.setattr(writer, "write_share", full)
    monkeypatch.setattr(writer, "ATTEMPTS", 1)
    job = writer.SaveJob(tmp_path, 4, "b", 0, 2, {}, {}, None, Keep(0), memory=0)
    assert writer.do(job, SharedMemory(), lambda: None).error == "the disk is full"
    assert there == ["iter_0000001", "tmp-iter_0000004-b"]


def test_a_writer_may_share_slow_storage_with_many() -> None:
    """A hundred ranks that write two files each get half a megabyte a second for a file from 100 MB/s."""
    assert manifest._FLUSH / 0.6e6 < writer.PATIENCE
