"""What a run says that has nothing left to train."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megavlm.train.loop import _ended


@pytest.mark.parametrize(
    ("began", "epochs", "said"),
    [
        (0, None, "finished"),
        (79, None, "finished"),
        (80, None, "the checkpoint is of iteration 80 and --train-iters ends at 80; raise --train-iters"),
        (100, 2.0, "the checkpoint is of iteration 100 and --epochs ends at 80; raise --epochs"),
    ],
)
def test_a_run_says_why_it_trained_nothing(began: int, epochs: float | None, said: str) -> None:
    train = SimpleNamespace(train_iters=80, epochs=epochs)
    run: Any = SimpleNamespace(position=SimpleNamespace(iteration=began), config=SimpleNamespace(train=train))
    told = _ended(run, max(80, began))
    assert said in told
    assert ("nothing was trained" in told) == (began >= 80)
