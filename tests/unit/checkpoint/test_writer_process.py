"""The process that writes checkpoints leaves alone what it has inherited from its rank."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from types import SimpleNamespace

import pytest

from megavlm.backend.host_copies import SharedMemory
from megavlm.checkpoint import saving, writer


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
