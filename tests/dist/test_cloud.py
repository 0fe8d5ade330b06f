"""Vertex AI and Kubernetes, played on this host: one world, which survives the loss of its machines."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megavlm.programs.launch.job import Job
from megavlm.programs.launch.kubernetes import objects
from tests.support.cloud import kubernetes_options
from tests.support.replicas import Platform, kubernetes, vertex
from tests.support.torchrun import TINY, WITHOUT_END, Lasting, last_iteration
from tests.support.training import assert_same_curve, metrics, train, without_wall_time

pytestmark = pytest.mark.slow

LAYOUT = "--pp 2".split()


class Run(Lasting):
    """A run that platforms train, and what it is compared with."""

    def __init__(self, run_dir: Path, *flags: str) -> None:
        super().__init__(run_dir, *LAYOUT, "--save-interval", "5", *flags)

    def replicas(self) -> Platform:
        return vertex(self.flags, self.run_dir, replicas=2)

    def pods(self) -> Platform:
        """A Job of two pods, as `megavlm launch kubernetes` makes it."""
        job = Job(2, 1, (*self.flags, "--run-dir", str(self.run_dir)))
        service, made = objects(job, kubernetes_options("megavlm", "image", volumes=[f"claim:{self.run_dir.parent}"]))
        assert service["kind"] == "Service"
        return kubernetes(made, self.run_dir)

    def is_like_one_undisturbed(self, pools, iterations: int) -> None:
        alone = self.run_dir.with_name("alone")
        pools(2).run(train, [*WITHOUT_END, *LAYOUT, "--train-iters", str(iterations), "--no-save"], str(alone))
        assert without_wall_time(metrics(self.run_dir)) == without_wall_time(metrics(alone))


def test_replicas_of_vertex_are_one_world_and_survive_the_loss_of_each(pools, tmp_path: Path):
    run = Run(tmp_path / "run")
    with run.replicas() as platform:
        platform.wait_for_iteration(8)
        platform.lose(1)
        platform.wait_for_iteration(last_iteration(run.run_dir) + 10)
        end = last_iteration(run.run_dir) + 30
        run.last(end)
        platform.lose(0)  # the primary replica
        assert platform.end() == 0, platform.output()
    assert sorted(platform.statuses) == [(0, -9), (0, 0), (1, -9), (1, 0)]
    run.is_like_one_undisturbed(pools, end)
    pools(1).run(train, [*TINY, "--train-iters", "8"], str(tmp_path / "one"))
    assert_same_curve(metrics(run.run_dir)[:8], metrics(tmp_path / "one"))


def test_a_pod_that_is_asked_for_saves_and_comes_back(pools, tmp_path: Path):
    """All pods stop with it; the others wait for the one in its place, and no step is done twice."""
    run = Run(tmp_path / "run")
    with run.pods() as platform:
        platform.wait_for_iteration(8)
        end = last_iteration(run.run_dir) + 200
        run.last(end)
        platform.send(1, signal.SIGTERM)
        assert platform.end() == 0, platform.output()
    assert sorted(platform.statuses) == [(0, 0), (1, 0), (1, 75)]
    run.is_like_one_undisturbed(pools, end)


def test_a_mistake_ends_the_job_on_both_platforms(tmp_path: Path):
    with Run(tmp_path / "pods", "--load", "nowhere").pods() as platform:
        assert platform.end() == 2, platform.output()
    assert len(platform.statuses) == 1
    with Run(tmp_path / "replicas", "--load", "nowhere").replicas() as platform:
        assert platform.end() == 2, platform.output()
    # Vertex AI starts them again whatever they return, and each ends before it builds anything.
    assert {status for _, status in platform.statuses} == {2}
