"""`megavlm why` on real small runs: the first cause that it names is the one that was built in."""

from __future__ import annotations

import contextlib
import io
import shutil
import signal
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megavlm.checkpoint.saving import Saver
from megavlm.data.loader import DataLoader, RankLoader
from megavlm.model.vlm import VLMChunk
from megavlm.programs.goodput import recoveries_of
from megavlm.programs.history import DATA, LOST, SAVES, TRAINING, history_of, records_of
from megavlm.programs.why import main
from megavlm.resilience.events import events
from megavlm.resilience.hang_reports import Limits, Report, culprit
from megavlm.resilience.phases import COMPUTE
from megavlm.resilience.watchdog import place_of, processor_time
from megavlm.train import build
from tests.support.covering import slow
from tests.support.pool import Pools
from tests.support.torchrun import TINY, Launched
from tests.support.training import metrics, of_kind, train

LATE = 0.3  # seconds that the cause takes each time
STEPS = 10


def slowed(function: Callable[..., Any], *, rank: int | None = None) -> Callable[..., Any]:
    """The function, later, on one rank or on all."""

    def late(*args: Any, **kwargs: Any) -> Any:
        if rank is None or dist.get_rank() == rank:
            time.sleep(LATE)
        return function(*args, **kwargs)

    return late


def train_impaired(argv: list[str], run_dir: str, cause: str) -> None:
    impaired: dict[str, tuple[type, str, int | None]] = {
        "data": (RankLoader, "_make", None),
        "saves": (Saver, "begin", None),
        "compute of rank 1": (VLMChunk, "forward", 1),
    }
    owner, name, rank = impaired[cause]
    with patch.object(owner, name, slowed(getattr(owner, name), rank=rank)):
        train(argv, run_dir)


def first_cause(run_dir: Path) -> str:
    """What `megavlm why` prints first, after its lines on the last start and on the whole."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([str(run_dir)]) == 0
    return said.getvalue().splitlines()[2]


@pytest.mark.parametrize(
    ("cause", "more", "words", "field"),
    [
        ("data", "--no-save", "the ranks wait for data", "data_time_s"),
        slow("saves", "--save-interval 2", "the run stands still while it saves", "save_stall_s"),
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


LAUNCHER = "--standalone --nproc-per-node 2".split()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_is_named(stopped: int, tmp_path: Path):
    argv = [*TINY, *"--tp 2 --train-iters 3000 --hang-timeout 20 --no-save".split()]
    with Launched(argv, tmp_path, launcher=LAUNCHER) as run:
        run.wait_for_iteration(12)
        run.send(signal.SIGSTOP, run.ranks()[stopped])
        assert run.status() == 1, run.output()
        assert not run.alive()
    assert f"the run hangs: rank {stopped} (" in run.output()
    assert "its process does not answer" in run.output()
    (event,) = [each for each in events(tmp_path) if each["kind"] == "hang"]
    assert event["stopped_rank"] == stopped
    stacks = tmp_path / event["stacks"] / f"rank-{1 - stopped}.txt"
    assert "train_step" in stacks.read_text()
    assert not (tmp_path / event["stacks"] / f"rank-{stopped}.txt").exists()
    assert f"no stacks of rank {stopped}" in (tmp_path / event["stacks"] / "README.txt").read_text()


@pytest.mark.slow
def test_a_rank_that_stops_while_the_run_is_built_is_named_before_torch_gives_up(tmp_path: Path):
    argv = [*TINY, *"--tp 2 --hang-timeout 5 --distributed-timeout-minutes 1 --no-save".split()]
    with Launched(argv, tmp_path, launcher=LAUNCHER) as run:
        run.wait_for((tmp_path / "config.yaml").exists)
        run.send(signal.SIGSTOP, run.ranks()[1])
        assert run.status() == 1
        assert not run.alive()
    assert "the run hangs: rank 1 (" in run.output()
    assert "in iteration 0, start (" in run.output()


def train_with_a_slow_rank(argv: list[str], run_dir: str) -> None:
    """Rank 1 sleeps before each step, as the attack's row 23. Each rank's device uses 10 joules until asked again."""
    original, joules = DataLoader.next_step, count(0, 10)

    def slowly(loader: DataLoader):
        if dist.get_rank() == 1:
            time.sleep(0.5)
        return original(loader)

    meter = patch.object(build, "energy_meter", lambda device: lambda: next(joules))
    with meter, patch.object(DataLoader, "next_step", slowly):
        train(argv, run_dir)


def test_a_slow_rank_is_named_with_the_phase_in_which_it_is_slow(pools: Pools, tmp_path: Path):
    argv = [*TINY, *"--train-iters 14 --hang-timeout 10 --no-save".split()]
    pools(2).run(train_with_a_slow_rank, argv, str(tmp_path))
    said = [record for record in metrics(tmp_path) if "slowest_rank" in record]
    assert said
    assert {record["slowest_rank"] for record in said} == {1}
    assert {record["slowest_rank_phase"] for record in said} == {"data"}
    assert all(record["slowest_rank_s"] > 0.5 for record in said)
    assert all("rank 1" in record["slow"] for record in said)
    assert said[-1]["phase_seconds"]["communication"] > 0.1, "the other rank waits there"
    assert said[-1]["energy_j"] == 20.0  # of both


def where_ranks_are(argv: list[str], run_dir: str) -> Report:
    """Rank 1 is stuck inside a layer for some seconds; return what this rank's watchdog would report meanwhile."""
    original, found = VLMChunk.forward, []
    trained = threading.get_ident()
    seen = Path(run_dir, "seen")  # rank 0 has looked: ranks come to the layer at different times on a busy machine

    def look() -> None:
        time.sleep(2.0)
        place, waits = place_of(trained)
        before = processor_time(trained)
        time.sleep(1.0)
        rank = dist.get_rank()
        same = processor_time(trained) == before
        found.append(Report(rank, "", 0, 1, 1, COMPUTE, "", 100.0, place, waits, steps=1, waited=same))
        if rank == 0:
            seen.touch()

    def forward(chunk: VLMChunk, *args, **kwargs):
        if not found:
            watching = threading.Thread(target=look)
            watching.start()
            if dist.get_rank() == 1:
                deadline = time.monotonic() + 60
                while not seen.exists() and time.monotonic() < deadline:
                    time.sleep(0.1)
                watching.join()
        return original(chunk, *args, **kwargs)

    with patch.object(VLMChunk, "forward", forward):
        train(argv, run_dir)
    return found[0]


@pytest.mark.slow
def test_of_tensor_parallel_ranks_the_one_that_keeps_the_others_waiting_is_named(pools: Pools, tmp_path: Path):
    """Both are in the same pass of the same micro-batch; one is in a collective, and uses no processor time there."""
    table = pools(2).run(where_ranks_are, [*TINY, *"--tp 2 --train-iters 4 --no-save".split()], str(tmp_path))
    assert [report.waits for report in table] == [True, False], table
    assert table[0].waited
    assert culprit(table, timeout=60.0, limits=Limits(), interval=5.0).rank == 1
