"""What grows with the ranks, at small sizes, and the laws by which the table goes beyond them."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[3]


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("scale")


def test_a_law_is_linear_unless_its_slope_rises(scale: Any) -> None:
    assert scale.law({1: 30, 2: 37, 4: 51}) == (23, 7, 0)
    assert scale.law({1: 1376, 2: 1775, 4: 2549}) == (1001, 387, 0)
    assert scale.law({1: 32, 2: 54, 4: 134}) == (22, 4, 6)
    assert scale.in_words((22, 4, 6)) == "6 N² + 4 N + 22"


@pytest.mark.parametrize("world", [8, 64])
def test_small_worlds(scale: Any, world: int) -> None:
    assert scale.store_requests(world)["requests to the store in a second"] <= 0.25 * world + 1
    waiting = scale.waiting_save(world)
    assert waiting["a minute of waiting for writers: stats"] <= 4 * world
    assert waiting["a minute of waiting for writers: listings"] <= 200


def test_requests_are_noted_and_files_elsewhere_are_not(scale: Any, tmp_path: Path) -> None:
    inside, log = tmp_path / "inside", tmp_path / "log"
    inside.mkdir()
    (inside / "a.json").write_text(json.dumps([1, 2, 3]))
    with scale.noted(inside, log):
        (inside / "a.json").read_text()
        (inside / "a.json").stat()
        list(inside.iterdir())
        list(tmp_path.iterdir())
        file = os.open(inside / "b.distcp", os.O_RDWR | os.O_CREAT)
        os.write(file, b"12345")
        os.preadv(file, [bytearray(4)], 0)
        os.fsync(file)
        os.close(file)
    told = "opens 1, bytes read 9, stats 1, listings 1, opens 1, bytes read 4, flushes 1"
    assert log.read_text().splitlines() == told.split(", ")


def test_what_ranks_tell_one_another_is_counted_by_its_receivers(scale: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: 5)

    def size_of(what: Any) -> int:
        return int(dist.distributed_c10d._object_to_tensor(what, torch.device("cpu"), None)[1])

    def broadcast_object_list() -> list[Any]:
        return [dist.distributed_c10d._object_to_tensor(each, torch.device("cpu"), None) for each in [[7]]]

    with scale.told(tmp_path / "log"):
        size = size_of([7])
        broadcast_object_list()
    assert (tmp_path / "log").read_text().splitlines() == [f"bytes told {size}", f"bytes told {4 * size}"]
