"""torchrun restarts a run by itself, and its curve is that of a run that was never disturbed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megavlm.resilience.events import events
from tests.support.data_files import sources_of, write_all
from tests.support.torchrun import TINY, Launched
from tests.support.training import metrics, train, without_wall_time

RUN = [*TINY, *"--tp 2 --train-iters 24 --save-interval 4".split()]


@pytest.fixture(scope="module")
def undisturbed(pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    pools(2).run(train, RUN, str(run_dir))
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["--standalone", "--master-port 0", "--rdzv-backend c10d"])
def test_a_rank_that_dies_costs_no_iteration(launcher: str, undisturbed: Path, tmp_path: Path):
    """Static and dynamic rendezvous keep their store differently."""
    argv = [*launcher.replace("port 0", f"port {free_port()}").split(), "--nproc-per-node", "2", "--max-restarts", "2"]
    with Launched(RUN, tmp_path / "run", launcher=argv) as run:
        for iteration in (6, 14):
            run.wait_for_iteration(iteration)
            run.send(signal.SIGKILL, run.ranks()[1])
        assert run.status() == 0, run.output()
    assert without_wall_time(metrics(tmp_path / "run")) == without_wall_time(metrics(undisturbed))


@pytest.mark.slow
def test_data_workers_that_are_lost_cost_nothing(pools, tmp_path: Path):
    """One is killed, and one is stopped for good."""
    files = [*TINY, *sources_of(write_all(tmp_path / "data")), *"--image-sizes --images-per-sample 1".split()]
    files += "--train-iters 60 --seq-length 96 --packing-window 16".split()
    pools(1).run(train, [*files, "--num-workers", "0"], str(tmp_path / "undisturbed"))
    with Launched([*files, "--data-worker-timeout", "5"], tmp_path / "run", launcher=None) as run:
        for number, iteration in ((signal.SIGKILL, 5), (signal.SIGSTOP, 20)):
            run.wait_for_iteration(iteration)
            run.send(number, run.workers()[0])
        assert run.status() == 0, run.output()
    assert without_wall_time(metrics(tmp_path / "run")) == without_wall_time(metrics(tmp_path / "undisturbed"))
    assert [event["kind"] for event in events(tmp_path / "run")].count("worker") == 2


def free_port() -> int:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
