"""Stopping and going on changes nothing: bit for bit on the same layout, within fp32 sums on another one."""

from __future__ import annotations

import os
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from megavlm.checkpoint import folders
from tests.support.flags import DROPOUT, FOUR, HALF, PADDED, TWO
from tests.support.forked import PATIENCE, start_program, status_of
from tests.support.pool import Pools
from tests.support.training import SMALL, assert_resumed, assert_same_curve, metrics, train


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(4, "--tp 2 --pp 2 --recompute-granularity full", marks=pytest.mark.slow),
        pytest.param(2, "--data-parallel-sharding none", marks=pytest.mark.slow),
        pytest.param(4, "--pp 2 --vpp 2", marks=pytest.mark.slow),
        (2, "--tp 2 --micro-batch-size 2 --placement colocated --encoder-chunk-patches 20"),
        (2, "--pp 2 --recompute-granularity full"),
        pytest.param(2, "--pp 2 --placement colocated --data-parallel-sharding none", marks=pytest.mark.slow),
        pytest.param(2, "--pp 2 --placement colocated --vision-tp 2", marks=pytest.mark.slow),
    ],
)
def test_same_layout_resumes_bit_for_bit(pools: Pools, tmp_path: Path, world: int, layout: str):
    argv = [*SMALL, *DROPOUT, *layout.split()]
    pools(world).run(train, [*argv, *FOUR], str(tmp_path / "whole"))
    pools(world).run(train, [*argv, *TWO], str(tmp_path / "halves"))
    pools(world).run(train, [*argv, *FOUR], str(tmp_path / "halves"))
    assert_resumed(metrics(tmp_path / "halves"), metrics(tmp_path / "whole"))


@pytest.fixture(scope="module")
def half_of_tp2_pp2(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of a run, on TP2·PP2."""
    run_dir = tmp_path_factory.mktemp("half")
    pools(4).run(train, [*SMALL, *PADDED.split(), *HALF, *"--tp 2 --pp 2".split()], str(run_dir))
    return run_dir


@pytest.fixture(scope="module")
def whole_on_one(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole")
    pools(1).run(train, [*SMALL, *PADDED.split(), "--no-save"], str(run_dir))
    return run_dir


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(4, "--pp 4", marks=pytest.mark.slow),
        pytest.param(4, "--tp 4 --micro-batch-size 4", marks=pytest.mark.slow),
        (2, "--pp 2 --vpp 2"),
        pytest.param(2, "", marks=pytest.mark.slow),
        pytest.param(1, "", marks=pytest.mark.slow),
        pytest.param(4, "--tp 2", marks=pytest.mark.slow),
        pytest.param(2, "--pp 2 --placement colocated", marks=pytest.mark.slow),
    ],
)
def test_checkpoint_resumes_on_any_layout(
    pools: Pools, half_of_tp2_pp2: Path, whole_on_one: Path, tmp_path: Path, world: int, layout: str
):
    run_dir = tmp_path / "run"
    shutil.copytree(half_of_tp2_pp2, run_dir)
    pools(world).run(train, [*SMALL, *PADDED.split(), *layout.split()], str(run_dir))
    assert_same_curve(metrics(run_dir), metrics(whole_on_one))


def test_colocated_checkpoint_resumes_in_stages(pools: Pools, whole_on_one: Path, tmp_path: Path):
    argv = [*SMALL, *PADDED.split()]
    pools(2).run(train, [*argv, *HALF, *"--tp 2 --placement colocated".split()], str(tmp_path))
    pools(2).run(train, [*argv, "--pp", "2"], str(tmp_path))
    assert_same_curve(metrics(tmp_path), metrics(whole_on_one))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("--pp 2 --placement colocated --vision-tp 2", "--tp 2"),
        pytest.param("--pp 2", "--tp 2 --placement colocated --vision-tp 2", marks=pytest.mark.slow),
        pytest.param(
            "--pp 2 --placement colocated", "--tp 2 --placement colocated --vision-tp 2", marks=pytest.mark.slow
        ),
    ],
)
def test_encoders_resume_with_another_tensor_parallelism(
    pools: Pools, whole_on_one: Path, tmp_path: Path, first: str, then: str
):
    argv = [*SMALL, *PADDED.split()]
    pools(2).run(train, [*argv, *HALF, *first.split()], str(tmp_path))
    pools(2).run(train, [*argv, *then.split()], str(tmp_path))
    assert_same_curve(metrics(tmp_path), metrics(whole_on_one))


def test_load_starts_from_another_run(pools: Pools, half_of_tp2_pp2: Path, whole_on_one: Path, tmp_path: Path):
    argv = [*SMALL, *PADDED.split(), "--load", str(half_of_tp2_pp2), "--pp", "2"]
    pools(2).run(train, argv, str(tmp_path))
    assert_same_curve(metrics(tmp_path), metrics(whole_on_one)[2:])


def train_with_lazy_counts(argv: list[str], run_dir: str) -> None:
    """As `train`, with an optimizer that counts steps as Transformer Engine's: in groups that this rank has any of."""
    from unittest.mock import patch

    from megavlm.optim.elementwise import ElementwiseOptimizer

    step = ElementwiseOptimizer.step

    def lazily(self: ElementwiseOptimizer) -> None:
        every = self.param_groups
        self.param_groups = [group for group in every if group["params"]]
        step(self)
        self.param_groups = every

    with patch.object(ElementwiseOptimizer, "step", lazily):
        train(argv, run_dir)


def test_steps_are_known_where_rank_0_trains_nothing(pools: Pools, tmp_path: Path):
    """An adapter in the last stage alone."""
    lora = "--pp 2 --lora-rank 4 --lora-targets language.layers.3.q_proj --freeze vision projector"
    argv = [*SMALL, *lora.split()]
    pools(2).run(train, argv, str(tmp_path / "whole"))
    pools(2).run(train_with_lazy_counts, [*argv, *HALF], str(tmp_path / "halves"))
    pools(2).run(train_with_lazy_counts, argv, str(tmp_path / "halves"))
    assert_resumed(metrics(tmp_path / "halves"), metrics(tmp_path / "whole"))


def start(run_dir: Path) -> BaseProcess:
    argv = [
        *SMALL,
        *"--train-iters 12 --save-interval 2 --keep-checkpoints 0".split(),
        *"--set model.vision.num_layers=1 model.language.num_layers=1".split(),
    ]
    return start_program([*argv, "--run-dir", str(run_dir)], run_dir.with_name(f"{run_dir.name}-output"))


def kill_once(process: BaseProcess, condition) -> None:
    """kill -9 the program and its children as soon as the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.is_alive(), "ended before it could be killed"
        assert time.monotonic() < deadline, "never got that far"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()


# Slow: four starts of the program. `unit/checkpoint/test_folders.py` shows that unfinished folders do not count.
@pytest.mark.slow
def test_killed_at_any_moment_resumes_from_the_newest_complete_checkpoint(tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    checkpoints = killed / "checkpoints"
    assert status_of(start(whole)) == 0

    def saving() -> bool:  # any but the first: on a busy machine the eye may be elsewhere during one
        return any(not path.name.startswith("tmp-iter_0000002") for path in checkpoints.glob("tmp-iter_*"))

    kill_once(start(killed), saving)
    survivors = [iteration for iteration, _ in folders.complete(checkpoints)]
    assert survivors == [2, 4, 6, 8, 10][: len(survivors)] != []
    kill_once(start(killed), lambda: len(folders.complete(checkpoints)) > len(survivors))  # between two saves
    assert status_of(start(killed)) == 0

    assert_resumed(metrics(killed), metrics(whole))
    assert not list(checkpoints.glob("tmp-*"))


def test_sigterm_saves_and_exits_cleanly(tmp_path: Path):
    process = start(tmp_path / "run")
    metrics_file = tmp_path / "run/metrics.jsonl"
    while not (metrics_file.exists() and metrics_file.read_bytes().count(b"\n") >= 3):
        assert process.is_alive(), (tmp_path / "run-output").read_text()
        time.sleep(0.002)
    process.terminate()
    assert status_of(process) == 75
    done = len(metrics(tmp_path / "run"))
    assert done < 12
    checkpoints = tmp_path / "run/checkpoints"
    assert folders.newest(checkpoints) == folders.folder_for(checkpoints, done)
