"""What no restart can mend is not built again by the same torchrun."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megavlm.errors import BadNumbers, UserError
from megavlm.programs.train import refuse_retry
from megavlm.resilience.status import note_failure, write_status

EARLIER, LATER = -60.0, +60.0  # start of torchrun, in seconds from the failure


def ask(run_dir: Path, *, world: int = 4, launched: float = EARLIER) -> None:
    refuse_retry(run_dir, world=world, launched=time.time() + launched)


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")


@pytest.mark.parametrize("kind", [UserError, BadNumbers])
def test_the_same_line_and_status_again(kind: type[UserError], tmp_path: Path):
    note_failure(tmp_path, kind("--load nowhere is no checkpoint"))
    with pytest.raises(kind, match=r"^--load nowhere is no checkpoint \(not tried again") as raised:
        ask(tmp_path)
    assert raised.value.status == kind.status


def test_another_torchrun_another_world_and_another_error_are_tried(tmp_path: Path):
    ask(tmp_path)  # there is no status yet
    note_failure(tmp_path, UserError("wrong"))
    ask(tmp_path, launched=LATER)
    ask(tmp_path, world=3)  # an agent has left: other ranks may do
    write_status(tmp_path, "running")
    ask(tmp_path)
    note_failure(tmp_path, RuntimeError("a rank died"))
    ask(tmp_path)
