"""Saves beside training: what a slow, failing or killed writer does to a run, and what a killed run leaves behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megavlm.checkpoint import folders, manifest
from tests.support.forked import PATIENCE, context, run_program, start_program, status_of
from tests.support.pool import Pools
from tests.support.training import SMALL, metrics, train, without_wall_time

TINY = [
    *SMALL,
    *"--vision-num-layers 1 --language-num-layers 1 --lr-warmup-iters 1 --save-interval 2 --keep-checkpoints 0".split(),
]


def kinds(run_dir: Path) -> list[tuple[str, int]]:
    """Return kind and iteration of the events of saves."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [(event["kind"], event["iteration"]) for event in events if event["kind"].startswith("save")]


def with_writer(argv: list[str], run_dir: str, how: str) -> str:
    """Train with a writer that misbehaves on the last rank, in the save of iteration 2; return the user's error."""
    import torch.distributed as dist

    from megavlm import backend
    from megavlm.checkpoint import writer
    from megavlm.checkpoint.tensor_files import SaveError
    from megavlm.config.cli import parse
    from megavlm.errors import UserError
    from megavlm.parallel.groups import destroy_groups
    from megavlm.train.build import build
    from megavlm.train.loop import fit

    original, log = writer.write_share, Path(run_dir) / "written"
    here = dist.get_rank() == dist.get_world_size() - 1

    def write_share(folder: Path, *args: Any, **kwargs: Any) -> Any:
        if here and "iter_0000002" in str(folder):
            log.parent.mkdir(exist_ok=True)
            before = log.read_text() if log.exists() else ""
            log.write_text(before + "x")
            if how == "waits":
                deadline = time.monotonic() + PATIENCE
                while len(metrics(run_dir)) < 4:
                    assert time.monotonic() < deadline
                    time.sleep(0.005)
            if how == "killed once" and not before:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "fails" or (how == "fails once" and not before):
                raise SaveError("__0_0.distcp cannot be written: the disk is full")
        return original(folder, *args, **kwargs)

    destroy_groups()
    writer.write_share = write_share
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            fit(build(parse([*argv, "--run-dir", run_dir]), backend.activate()))
    except UserError as error:
        return str(error)
    finally:
        writer.write_share = original
    return ""


@pytest.fixture(scope="module")
def undisturbed(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    pools(1).run(train, [*TINY, "--train-iters", "6"], str(run_dir))
    return run_dir


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("waits", [("save", 2), ("save", 4), ("save", 6)]),  # for steps that a save in step would keep from running
        ("fails once", [("save_failed", 2), ("save", 2), ("save", 4), ("save", 6)]),
        ("killed once", [("save", 2), ("save", 4), ("save", 6)]),
        ("fails", [("save_failed", 2), ("save_failed", 2), ("save", 4), ("save", 6)]),
        ("killed", [("save_failed", 2), ("save", 4), ("save", 6)]),
    ],
)
def test_a_run_goes_on_whatever_happens_to_its_writer(
    pools: Pools, undisturbed: Path, tmp_path: Path, how: str, expected: list[tuple[str, int]]
) -> None:
    assert pools(1).run(with_writer, [*TINY, "--train-iters", "6"], str(tmp_path), how) == [""]
    assert kinds(tmp_path) == expected
    root = tmp_path / "checkpoints"
    saved = [iteration for kind, iteration in expected if kind == "save"]
    assert [iteration for iteration, _ in folders.complete(root)] == saved
    assert all(manifest.damage(folder) is None for _, folder in folders.complete(root))
    assert not list(root.glob("tmp-*"))
    assert without_wall_time(metrics(tmp_path)) == without_wall_time(metrics(undisturbed))
    for iteration in saved:  # the same tensors, byte for byte
        ours, theirs = (folders.folder_for(each / "checkpoints", iteration) for each in (tmp_path, undisturbed))
        assert (ours / "__0_0.distcp").read_bytes() == (theirs / "__0_0.distcp").read_bytes()


def test_stalls_and_times_of_saves_are_measured(undisturbed: Path) -> None:
    records = metrics(undisturbed)
    assert [record["iteration"] for record in records if "save_stall_s" in record] == [3, 5]
    assert sum("save_time_s" in record for record in records) in (1, 2)


def test_a_failed_last_save_ends_with_a_message(pools: Pools, tmp_path: Path) -> None:
    argv = [*TINY, "--train-iters", "2", "--tp", "2"]
    for error in pools(2).run(with_writer, argv, str(tmp_path), "fails"):
        assert "the disk is full" in error


def test_no_async_save_waits(pools: Pools, undisturbed: Path, tmp_path: Path) -> None:
    pools(1).run(train, [*TINY, "--train-iters", "6", "--no-async-save"], str(tmp_path))
    assert without_wall_time(metrics(tmp_path)) == without_wall_time(metrics(undisturbed))
    assert [record["iteration"] for record in metrics(tmp_path) if "save_time_s" in record] == [3, 5]


def slowly(argv: list[str], output: str) -> None:
    """Run the program; its writer leaves a file at each phase of the save of iteration 4, and waits a little there."""
    from megavlm.checkpoint import folders, retention, writer

    def pausing(module: Any, name: str, phase: str) -> None:
        original = getattr(module, name)

        def paused(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if "0000004" in str(args) or (name == "prune" and (Path(output).with_name("listed")).exists()):
                Path(output).with_name(phase).touch()
                time.sleep(0.3)
            return result

        setattr(module, name, paused)

    pausing(writer, "write_share", "written")
    pausing(writer, "_report", "reported")
    pausing(writer, "write_metadata", "described")
    pausing(folders, "write_manifest", "listed")
    pausing(retention, "prune", "committed")
    run_program(argv, output)


PHASES = ["written", "reported", "described", "listed", "committed"]


@pytest.mark.parametrize(
    "phase", [each if each == "listed" else pytest.param(each, marks=pytest.mark.slow) for each in PHASES]
)
def test_killed_in_any_phase_of_a_save_the_run_goes_on_from_a_whole_checkpoint(
    undisturbed: Path, tmp_path: Path, phase: str
) -> None:
    run_dir = tmp_path / "run"
    argv = [*TINY, "--train-iters", "6", "--run-dir", str(run_dir)]
    process = context().Process(target=slowly, args=(argv, str(tmp_path / "output")))
    process.start()
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / phase).exists():
        assert process.is_alive(), (tmp_path / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    found = folders.complete(run_dir / "checkpoints")
    assert [iteration for iteration, _ in found] == ([2, 4] if phase == "committed" else [2])
    assert all(manifest.damage(folder) is None for _, folder in found)
    assert status_of(start_program(argv, tmp_path / "output")) == 0
    assert without_wall_time(metrics(run_dir)) == without_wall_time(metrics(undisturbed))
    assert not list((run_dir / "checkpoints").glob("tmp-*"))
