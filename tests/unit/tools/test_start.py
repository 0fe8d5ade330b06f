"""How many processes a start of the demo has, and when it is refused for want of memory."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

GIB = 2**30


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("start")


def test_a_layout_has_its_processes_and_flags(start: Any) -> None:
    layout = start.layout_of("tp8,pp2,dp4,vpp2")
    assert start.ranks_of(layout) == 64
    assert start.flags(layout) == "--tp 8 --pp 2 --vpp 2 --no-save --mbs 1 --gbs 16"
    assert start.flags({"tp": 2}) == "--tp 2"
    with pytest.raises(ValueError, match="'ep2' is no degree"):
        start.layout_of("tp2,ep2")


def test_processes_that_do_not_fit_are_refused(start: Any) -> None:
    assert start.refusal(64, int(0.5 * GIB), 21 * GIB) is None
    told = "64 processes would take 17.6 GiB, by the 0.5 of two, and 17.0 GiB are free: use --world 60"
    assert start.refusal(64, int(0.5 * GIB), 17 * GIB) == told
    assert 10 * 2**20 < start.memory_of(os.getppid()) < GIB * 16
    assert 0 < start.free_memory() < 2**50
