"""`tools/why.py` on real small runs: the first cause that it names is the one that was built in."""

from __future__ import annotations

import contextlib
import io
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megavlm.programs.goodput import recoveries_of
from megavlm.programs.history import DATA, LOST, SAVES, TRAINING, history_of, records_of
from megavlm.programs.why import main
from megavlm.resilience.events import events
from tests.support.pool import Pools
from tests.support.torchrun import TINY
from tests.support.training import metrics, of_kind, train

LATE = 0.3  # seconds that the cause takes each time
STEPS = 10


def slowed(function: Callable[..., Any], *, rank: int | None = None) -> Callable[..., Any]:
    """The function, later, on one rank or on all."""
    import torch.distributed as dist

    def late(*args: Any, **kwargs: Any) -> Any:
        if rank is None or dist.get_rank() == rank:
            time.sleep(LATE)
        return function(*args, **kwargs)

    return late


def train_impaired(argv: list[str], run_dir: str, cause: str) -> None:
    from megavlm.checkpoint.saving import Saver
    from megavlm.data.loader import RankLoader
    from megavlm.model.vlm import VLMChunk

    impaired: dict[str, tuple[type, str, int | None]] = {
        "data": (RankLoader, "_make", None),
        "saves": (Saver, "begin", None),
        "compute of rank 1": (VLMChunk, "forward", 1),
    }
    owner, name, rank = impaired[cause]
    with patch.object(owner, name, slowed(getattr(owner, name), rank=rank)):
        train(argv, run_dir)


def first_cause(run_dir: Path) -> str:
    """What `tools/why.py` prints first, after its lines on the last start and on the whole."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([str(run_dir)]) == 0
    return said.getvalue().splitlines()[2]


@pytest.mark.parametrize(
    ("cause", "more", "words", "field"),
    [
        ("data", "--no-save", "the ranks wait for data", "data_time_s"),
        ("saves", "--save-interval 2", "the run stands still while it saves", "save_stall_s"),
        ("compute of rank 1", "--no-save --hang-timeout 10", "rank 1 is slower than the others in compute", None),
    ],
)
def test_the_cause_is_named_first(pools: Pools, tmp_path: Path, cause: str, more: str, words: str, field: str | None):
    pools(2).run(train_impaired, [*TINY, "--train-iters", str(STEPS), *more.split()], str(tmp_path), cause)
    assert words in first_cause(tmp_path)
    past = history_of(events(tmp_path), records_of(tmp_path))
    if field is not None:
        told = sum(record.get(field, 0.0) for record in metrics(tmp_path))
        assert told > LATE
        assert past.seconds[{"data": DATA, "saves": SAVES}[cause]] > 0.99 * told


def test_steps_after_the_checkpoint_are_lost_and_done_again(pools: Pools, tmp_path: Path):
    argv = [*TINY, "--save-interval", "4"]
    pools(1).run(train, [*argv, "--train-iters", "7"], str(tmp_path))
    lost = {record["iteration"]: record for record in metrics(tmp_path)}
    shutil.rmtree(tmp_path / "checkpoints" / "iter_0000007")
    pools(1).run(train, [*argv, "--train-iters", "9"], str(tmp_path))
    again = of_kind(tmp_path, "start")[1]
    assert (again["iteration"], again["lost_steps"], again["last_lost"]) == (4, 3, lost[7]["time"])
    assert again["seconds"] > again["load_seconds"] > 0
    first, second = of_kind(tmp_path, "started")
    assert (first["iteration"], second["iteration"]) == (1, 5)
    assert sum(second["phases"].values()) == pytest.approx(second["seconds"], abs=0.02)
    assert second["phases"]["weights"] > 0
    past = history_of(events(tmp_path), records_of(tmp_path))
    assert past.seconds[LOST] > sum(lost[i]["step_time_s"] for i in (5, 6, 7)) - 1e-3
    assert past.seconds[TRAINING] < sum(record["step_time_s"] for record in metrics(tmp_path)) + 1e-3
    (back,) = recoveries_of(past)
    assert (back["kind"], back["lost_steps"]) == ("finish", 3)
    assert back["to_step"] is not None
