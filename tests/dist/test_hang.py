"""A rank that stops: the run ends by itself within a minute, and names that rank and not one that waits for it."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from megavlm.resilience.events import events
from megavlm.resilience.hang_reports import Limits, Report, culprit
from megavlm.resilience.phases import COMPUTE
from megavlm.resilience.watchdog import place_of, processor_time
from tests.support.pool import Pools
from tests.support.torchrun import TINY, Launched
from tests.support.training import metrics, train

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
    """Rank 1 sleeps before each step, as the attack's row 23."""
    import torch.distributed as dist

    from megavlm.data.loader import DataLoader

    original = DataLoader.next_step

    def slowly(loader: DataLoader):
        if dist.get_rank() == 1:
            time.sleep(0.5)
        return original(loader)

    with patch.object(DataLoader, "next_step", slowly):
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


def where_ranks_are(argv: list[str], run_dir: str) -> Report:
    """Rank 1 is stuck inside a layer for some seconds; return what this rank's watchdog would report meanwhile."""
    import torch.distributed as dist

    from megavlm.model.vlm import VLMChunk

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


def test_of_tensor_parallel_ranks_the_one_that_keeps_the_others_waiting_is_named(pools: Pools, tmp_path: Path):
    """Both are in the same pass of the same micro-batch; one is in a collective, and uses no processor time there."""
    table = pools(2).run(where_ranks_are, [*TINY, *"--tp 2 --train-iters 4 --no-save".split()], str(tmp_path))
    assert [report.waits for report in table] == [True, False], table
    assert table[0].waited
    assert culprit(table, timeout=60.0, limits=Limits(), interval=5.0).rank == 1
