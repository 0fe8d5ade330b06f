"""State of any rule in a file: numbers as in memory, bounded buffers, nothing left behind, and disks that fail."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.errors import ScratchLost, UserError
from megavlm.optim.elementwise import ElementwiseOptimizer, ElementwiseRule
from megavlm.optim.rules import ADAMW, ELEMENTWISE
from megavlm.optim.stores import DiskStore, HostStore, Scratch

SHAPES = ((37, 5), (64,), (3, 3, 3), (101, 7), (1,), (50, 50))


def params() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def on_disk(
    values: list[Tensor], folder: Path, piece: int = 500, rule: ElementwiseRule = ADAMW
) -> ElementwiseOptimizer:
    store = DiskStore(folder, values, rule.state)
    store.piece = piece
    return ElementwiseOptimizer(values, rule, store, lr=1e-2, weight_decay=0.1)


def in_memory(values: list[Tensor], piece: int = 500, rule: ElementwiseRule = ADAMW) -> ElementwiseOptimizer:
    store = HostStore()
    store.piece = piece
    return ElementwiseOptimizer(values, rule, store, lr=1e-2, weight_decay=0.1)


def step(optimizer: ElementwiseOptimizer, values: list[Tensor], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for each in values:
        each.grad = torch.randn(each.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("rule", ELEMENTWISE.values(), ids=ELEMENTWISE)
@pytest.mark.parametrize("piece", [1, 64, 10**6])
def test_numbers_are_those_of_state_in_memory(tmp_path: Path, piece: int, rule: ElementwiseRule) -> None:
    ours, theirs = params(), params()
    disk, host = on_disk(ours, tmp_path, piece, rule), in_memory(theirs, piece, rule)
    for number in range(4):
        step(disk, ours, number)
        step(host, theirs, number)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        for name in rule.state:
            assert torch.equal(disk.state[mine][name], host.state[other][name])


def test_averages_stay_in_memory(tmp_path: Path) -> None:
    """The file has room for the rule's state alone."""
    values = params()
    optimizer = on_disk(values, tmp_path)
    optimizer.beside = ("ema",)
    optimizer.begin()
    assert all(torch.equal(optimizer.state[each]["ema"], each) for each in values)
    step(optimizer, values, 0)
    assert not any(torch.equal(optimizer.state[each]["ema"], each) for each in values)


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        scratch = Scratch(tmp_path / "new", 1000)
        scratch.write(10, torch.ones(5))
        if scratch.numbers[9:16].tolist() == [0, 1, 1, 1, 1, 1, 0]:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]


class Failing:
    """Calls of the system that fail from the given one on."""

    def __init__(self, call: Any, after: int, error: int = errno.ENOSPC) -> None:
        self.call, self.left, self.error = call, after, error

    def __call__(self, *arguments: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.error, os.strerror(self.error))
        return self.call(*arguments)


@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_failing_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: int) -> None:
    values = params()
    optimizer = on_disk(values, tmp_path, piece=64)
    monkeypatch.setattr(os, call, Failing(getattr(os, call), after))
    with pytest.raises(
        ScratchLost, match=r"--offload optimizer=nvme:.*No space left.* the last checkpoint is whole"
    ) as raised:
        step(optimizer, values, 0)
    assert "\n" not in str(raised.value)


def test_a_full_disk_is_found_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot reserve 0.00 GiB .*Not a directory.*name another folder"):
        Scratch(tmp_path / "file" / "x", 10)
    monkeypatch.setattr(os, "posix_fallocate", Failing(None, 0))
    with pytest.raises(UserError, match=r"cannot reserve 4.00 GiB .*No space left"):
        Scratch(tmp_path, 2**30)


def test_calls_that_move_less_than_asked_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, numbers = Scratch(tmp_path, 1000), torch.arange(900, dtype=torch.float32)
    whole = {name: getattr(os, name) for name in ("preadv", "pwritev")}
    for name, call in whole.items():
        monkeypatch.setattr(os, name, lambda fd, parts, place, call=call: call(fd, [parts[0][:100]], place))
    scratch.write(50, numbers)
    found = torch.empty(900)
    scratch.read(50, found)
    assert torch.equal(found, numbers)
    os.ftruncate(scratch._file.fileno(), 2000)
    with pytest.raises(ScratchLost, match="the file has become shorter"):
        scratch.read(0, found)
