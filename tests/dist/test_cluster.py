"""launch/slurm.sbatch on a cluster of two nodes: one world, in the order of the nodes, and no work lost or repeated."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from megavlm.checkpoint.folders import complete
from megavlm.programs.sweep import sweep
from megavlm.programs.sweep.grid import read_grid, variants_of
from megavlm.programs.sweep.sweep import results
from megavlm.programs.sweep.training import state_of
from megavlm.resilience.events import events, read_status, record
from tests.support.cluster import GPUS, NODES, Cluster, Job, needs_cluster
from tests.support.forked import PATIENCE, ROOT
from tests.support.torchrun import WITHOUT_END, Lasting, last_iteration
from tests.support.training import metrics, train, without_wall_time

pytestmark = needs_cluster

LAYOUT = "--tp 2 --pp 2".split()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


class Run(Lasting):
    """A run folder and the job that trains in it."""

    def __init__(
        self, cluster: Cluster, run_dir: Path, *flags: str, iterations: int = 20_000, grace: int = 240
    ) -> None:
        super().__init__(run_dir, *LAYOUT, *flags, iterations=iterations)
        options = [f"--nodes={len(NODES)}", f"--gpus-per-node={GPUS}", f"--output={run_dir.with_suffix('.out')}"]
        script = ["launch/slurm.sbatch", *self.flags, "--run-dir", str(run_dir)]
        words = [*options, "--time=60", "--signal=B:USR1@100", *script]
        self.job = cluster.submit(*words, MEGAVLM_GRACE=str(grace))

    def saved(self) -> int:
        """Return the iteration of the newest checkpoint."""
        return complete(self.run_dir / "checkpoints")[-1][0]

    def reaches(self, iteration: int) -> None:
        self.job.wait_for(lambda: last_iteration(self.run_dir) >= iteration)

    def finishes_like_one_undisturbed(self, pools, iterations: int, folder: Path) -> None:
        assert self.job.end() == ("COMPLETED", 0), self.job.output()
        pools(4).run(train, [*WITHOUT_END, *LAYOUT, "--train-iters", str(iterations), "--no-save"], str(folder))
        assert without_wall_time(metrics(self.run_dir)) == without_wall_time(metrics(folder))


def ranks(job: Job) -> dict[int, psutil.Process]:
    """The processes of a job's ranks, without those that they forked, which write checkpoints."""
    found = {}
    for process in psutil.process_iter():
        try:
            command, parent = process.cmdline(), process.parent()
            own = command[1:2] == ["-u"] and (parent is None or parent.cmdline()[1:2] != ["-u"])
            variables = process.environ() if own and "pretrain_vlm.py" in command else {}
        except psutil.Error:
            continue
        if variables.get("SLURM_JOB_ID") == job.number and "LOCAL_RANK" in variables:
            found[int(variables["RANK"])] = process
    return found


def test_tasks_of_srun_are_one_world_in_the_order_of_the_nodes(cluster: Cluster):
    program = "import os; from megavlm.world import world_of as w; x = w(os.environ); "
    program += "print(os.environ['SLURMD_NODENAME'], x.rank, x.world_size, x.local_rank, x.local_world_size, x.address)"
    python = cluster.env["MEGAVLM_PYTHON"]
    told = cluster.ask("srun --nodes=2 --ntasks-per-node=2 --overcommit", python, "-c", program)
    assert sorted(told.splitlines()) == [
        f"{node} {rank} 4 {rank % 2} 2 fake1" for rank, node in enumerate(("fake1", "fake1", "fake2", "fake2"))
    ]


@pytest.mark.slow
def test_a_job_goes_on_after_its_time_limit(cluster: Cluster, pools, tmp_path: Path):
    run = Run(cluster, tmp_path / "run")
    run.reaches(10)
    hours, minutes, _ = run.job.shown()["RunTime"].split(":")
    limit = 60 * int(hours) + int(minutes) + 2  # which leaves 60 to 120 s: the warning is due 100 s before
    cluster.ask("scontrol update", f"JobId={run.job.number}", f"TimeLimit={limit}")
    run.job.wait_for(lambda: read_status(run.run_dir)["state"] == "stopped")
    run.last(run.saved() + 5)
    run.job.wait_for(lambda: run.job.restarts == 1)
    cluster.ask("scontrol update", f"JobId={run.job.number}", "TimeLimit=60")
    run.finishes_like_one_undisturbed(pools, run.saved() + 5, tmp_path / "undisturbed")
    kinds = [event["kind"] for event in events(run.run_dir) if event["kind"] in ("start", "stop", "failure", "finish")]
    assert kinds == ["start", "stop", "start", "finish"], run.job.output()


@pytest.mark.slow
def test_a_job_that_is_cancelled_has_saved(cluster: Cluster, tmp_path: Path):
    run = Run(cluster, tmp_path / "run")
    run.reaches(5)
    cluster.ask("scancel", run.job.number)
    assert run.job.end()[0] == "CANCELLED", run.job.output()
    status = read_status(run.run_dir)
    assert (status["state"], run.job.restarts) == ("stopped", 0), run.job.output()
    assert run.saved() == status["iteration"] == last_iteration(run.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("node", NODES)
def test_a_node_that_is_lost_costs_no_iteration(node: str, cluster: Cluster, pools, tmp_path: Path):
    """The first has the job's script as well."""
    run = Run(cluster, tmp_path / "run", "--save-interval", "10")
    run.job.wait_for(lambda: bool(complete(run.run_dir / "checkpoints")))  # written while further steps are made
    cluster.lose_node(node)
    last = run.saved() + 10
    run.last(last)
    run.job.wait_for(lambda: run.job.restarts == 1)
    cluster.start_node(node)
    run.finishes_like_one_undisturbed(pools, last, tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--tp 3", "--load nowhere"])
def test_a_mistake_ends_a_job(flags: str, cluster: Cluster, tmp_path: Path):
    """Before the ranks start, and after they have found it."""
    run = Run(cluster, tmp_path / "run", *flags.split())
    assert run.job.end() == ("FAILED", 2), run.job.output()
    assert run.job.restarts == 0


@pytest.mark.slow
def test_a_node_whose_device_computes_wrongly_is_left_out(cluster: Cluster, tmp_path: Path):
    run = Run(cluster, tmp_path / "run", "--save-interval", "5")
    run.reaches(6)
    record(run.run_dir, "mismatch", hosts=["fake2"])
    (run.run_dir / "jobs" / f"{run.job.number}.exit").write_text("71")
    ranks(run.job)[0].send_signal(signal.SIGKILL)
    run.job.wait_for(lambda: run.job.shown().get("ExcNodeList") == "fake2")
    assert run.job.restarts == 1
    cluster.ask("scancel", run.job.number)


@pytest.mark.slow
def test_an_array_trains_the_variants_of_a_grid(cluster: Cluster, tmp_path: Path, monkeypatch, capsys):
    """Each task reads its own flags, one of which is wrong; the table has all, and nothing is trained twice."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    file = tmp_path / "grid.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                **{"run_dir": str(tmp_path / "my runs"), "processes": GPUS},
                "flags": [*WITHOUT_END, *"--tp 2 --train-iters 4".split()],
                "list": [{"lr": 0.001}, {"lr": 0.002}, {"load": "nowhere"}],
            }
        )
    )
    grid = read_grid(file)
    variants = variants_of(grid)
    flags = [str(file), *"--on slurm --parallel 2 --run-dir-is-shared --time=60".split()]
    assert sweep.main(flags) == 0
    end = time.monotonic() + PATIENCE
    while (states := [state_of(variant) for variant in variants]) != ["finished", "finished", "failed"]:
        assert time.monotonic() < end, (states, cluster.ask("squeue"), cluster.logs())
        time.sleep(1)
    while cluster.ask("squeue --noheader"):
        time.sleep(1)
    capsys.readouterr()
    assert sweep.main(flags) == 0
    told = capsys.readouterr().out
    assert told.startswith("0 of 3 variants are to train"), told
    (head, *rows), _ = results(grid, variants)
    assert [row[head.index("iteration")] for row in rows] == ["4", "4", "0"]
    assert rows[0][head.index("loss")] != rows[1][head.index("loss")]
    assert (tmp_path / "my runs/sweep.tsv").exists()


@pytest.mark.slow
def test_a_job_that_crashes_without_progress_ends(cluster: Cluster, tmp_path: Path):
    """A rank may die before the others have met it: they are waited for no longer than the grace."""
    run = Run(cluster, tmp_path / "run", grace=15)
    for restarts in (0, 1):
        run.job.wait_for(lambda restarts=restarts: run.job.restarts == restarts and len(ranks(run.job)) == 4)
        ranks(run.job)[3].send_signal(signal.SIGKILL)
    assert run.job.end() == ("FAILED", 1), run.job.output()
    assert run.job.restarts == 1
