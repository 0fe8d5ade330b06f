"""A step that would outlast the time between SIGTERM and SIGKILL is given up on all ranks, and nothing of it stays."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megavlm.errors import Stopped
from megavlm.resilience.signals import StopRequest
from megavlm.resilience.status import read_status
from tests.support.torchrun import TINY
from tests.support.training import metrics, train, without_wall_time

# Eight micro-batches per replica, whose attention draws random numbers.
RUN = [*TINY, *"--global-batch-size 16 --train-iters 5 --save-interval 100 --hang-timeout 20".split()]
RUN += ["--attention-dropout", "0.1"]
ASKED, SLOW = 3, 1.5  # in which step the run is asked to stop, and seconds per micro-batch of it


def train_and_stop(argv: list[str], run_dir: str, asked_rank: int) -> tuple[str, int]:
    """Ask one rank to stop at the second micro-batch of step 3; return why it ended, and its micro-batches."""
    import torch.distributed as dist

    from megavlm import backend
    from megavlm.config.cli import parse
    from megavlm.parallel.groups import destroy_groups
    from megavlm.train.build import build
    from megavlm.train.loop import fit

    destroy_groups()
    run = build(parse([*argv, "--run-dir", run_dir]), backend.activate())
    stop, schedule = StopRequest(), run.engine.schedule
    begun: list[int] = []
    chunk = schedule.chunks[0]
    original = chunk.forward

    def forward(*args, **kwargs):
        if schedule.phases.now.iteration == ASKED and chunk.training:
            begun.append(ASKED)
            if len(begun) == 2 and dist.get_rank() == asked_rank:
                stop.patience = 0.0  # as if 10 of 30 s were over
                stop.ask("SIGTERM received", warning=False, urgent=True)
            time.sleep(SLOW)
        return original(*args, **kwargs)

    chunk.forward = forward
    try:
        fit(run, stop)
    except Stopped as ended:
        return str(ended), len(begun)
    return "", len(begun)


@pytest.mark.parametrize(
    "layout",
    [
        "--data-parallel-sharding optimizer",
        pytest.param("--tp 2", marks=pytest.mark.slow),
        pytest.param("--placement colocated --tp 2", marks=pytest.mark.slow),
    ],
)
def test_a_long_step_is_given_up(layout: str, pools, tmp_path: Path):
    argv = [*RUN, *layout.split()]
    pools(2).run(train, argv, str(tmp_path / "undisturbed"))
    (asked, begun), (other, also) = pools(2).run(train_and_stop, argv, str(tmp_path / "run"), 1)
    assert {asked, other} == {"SIGTERM received", "another rank was asked to stop"}
    assert begun == also < 16 // (1 if "--tp" in layout else 2)
    status = read_status(tmp_path / "run")
    assert (status["state"], status["iteration"]) == ("stopped", ASKED - 1)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [f"iter_{ASKED - 1:07d}"]
    pools(2).run(train, argv, str(tmp_path / "run"))
    assert without_wall_time(metrics(tmp_path / "run")) == without_wall_time(metrics(tmp_path / "undisturbed"))


@pytest.mark.slow
def test_with_a_pipeline_the_step_is_finished(pools, tmp_path: Path):
    """Its stages wait for one another wherever they are."""
    ended = pools(2).run(train_and_stop, [*RUN, "--pp", "2"], str(tmp_path), 1)
    assert [begun for _, begun in ended] == [16, 16]
    assert read_status(tmp_path)["iteration"] == ASKED
