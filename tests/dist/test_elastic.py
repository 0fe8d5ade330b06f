"""Agents (the torchrun of a node) that join, die and leave while a job runs: it goes on, with the same global batch."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.replicas import free_ports
from tests.support.torchrun import TINY, Launched, last_iteration
from tests.support.training import assert_same_curve, metrics, of_kind, train

ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.slow
def test_agents_join_die_and_leave(pools, tmp_path: Path):
    """Each change costs the steps since the last checkpoint; the curve is that of one process."""
    argv = [*TINY, *"--train-iters 100000 --lr-decay-iters 4000 --save-interval 10 --log-interval 10".split()]
    run_dir = tmp_path / "run"
    port = free_ports(1)[0]

    def agent() -> Launched:
        launcher = (
            f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 20 --rdzv-backend c10d --rdzv-endpoint localhost:{port} "
            "--rdzv-id job --rdzv-conf last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5 "
            "--shutdown-timeout 120"
        )
        return Launched(argv, run_dir, launcher=launcher.split(), env=ENV)

    def worlds() -> list[int]:
        return [event["world"] for event in of_kind(run_dir, "start")]

    with agent() as first:
        first.wait_for_iteration(12)
        with agent() as dies:
            first.wait_for(lambda: worlds() == [1, 2])
            wait_for_more(first, run_dir)
            first.send(signal.SIGKILL, dies.process, *dies.ranks())
            first.wait_for(lambda: worlds() == [1, 2, 1])
        wait_for_more(first, run_dir)
        with agent() as leaves:
            first.wait_for(lambda: worlds() == [1, 2, 1, 2])
            wait_for_more(first, run_dir)
            first.send(signal.SIGTERM, leaves.process)
            leaves.status()
            assert not leaves.alive()
            first.wait_for(lambda: worlds() == [1, 2, 1, 2, 1])
        wait_for_more(first, run_dir)
        first.send(signal.SIGTERM, first.process)
        first.status()
    reached = last_iteration(run_dir)
    undisturbed = [*argv, "--train-iters", str(reached), "--no-save", "--save-interval", "0"]
    pools(1).run(train, undisturbed, str(tmp_path / "undisturbed"))
    assert_same_curve(metrics(run_dir), metrics(tmp_path / "undisturbed"))


def wait_for_more(run: Launched, run_dir: Path) -> None:
    """Wait for some steps more."""
    run.wait_for_iteration(last_iteration(run_dir) + 12)
