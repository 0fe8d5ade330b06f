"""Saves beside training: what a slow, failing or killed writer does to a run, and what a killed run leaves behind."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megavlm.checkpoint import folders, manifest
from megavlm.resilience.events import events
from tests.support.covering import fast_and_slow, slow
from tests.support.forked import PATIENCE, context, run_program, start_program, status_of
from tests.support.pool import Pools
from tests.support.training import SHALLOW, asking_to_stop, metrics, train, without_wall_time

TINY = [*SHALLOW, *"--save-interval 2 --keep-checkpoints 0".split()]


def kinds(run_dir: Path) -> list[tuple[str, int]]:
    """Return kind and iteration of the events of saves."""
    return [(event["kind"], event["iteration"]) for event in events(run_dir) if event["kind"].startswith("save")]


def with_writer(argv: list[str], run_dir: str, how: str) -> str:
    """Train with a writer that misbehaves on the last rank ("is slow": on the first), in the save of iteration 2;
    return the user's error.
    """
    import torch.distributed as dist

    from megavlm.checkpoint import saving, writer
    from megavlm.checkpoint.staging import SaveError, Staging
    from megavlm.errors import UserError
    from megavlm.resilience.phases import Phases

    original, log = writer.write_share, Path(run_dir) / "written"
    here = dist.get_rank() == (0 if how == "is slow" else dist.get_world_size() - 1)

    def write_share(folder: Path, *args: Any, **kwargs: Any) -> Any:
        if here and "iter_0000002" in str(folder):
            log.parent.mkdir(exist_ok=True)
            before = log.read_text() if log.exists() else ""
            log.write_text(before + "x")
            if how == "waits":
                assert os.nice(0) >= 10, "training comes first"
                deadline = time.monotonic() + PATIENCE
                while len(metrics(run_dir)) < 4:
                    assert time.monotonic() < deadline
                    time.sleep(0.005)
            if how == "is slow":
                time.sleep(3.5)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs once" and not before:
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "fails" or (how == "fails once" and not before):
                raise SaveError("__0_0.distcp cannot be written: the disk is full")
        return original(folder, *args, **kwargs)

    full = OSError(errno.ENOMEM, "Cannot allocate memory") if how == "no memory" and here else None
    with (
        mock.patch.object(writer, "write_share", write_share),
        mock.patch.object(saving, "PATIENCE", 3.0 if how == "hangs once" else saving.PATIENCE),
        mock.patch.object(Staging, "copy", side_effect=full) if full is not None else contextlib.nullcontext(),
        mock.patch.object(Phases, "enter", autospec=True, side_effect=Phases.enter) as entered,
    ):
        try:
            train(argv, run_dir)
        except UserError as error:
            return str(error)
    if str(entered.mock_calls).count("waits for the writer") < {"hangs once": 1, "is slow": 3}.get(how, 0):
        return "the watchdog would take the wait for a writer for a hang"
    return ""


@pytest.fixture(scope="module")
def undisturbed(run_once) -> Path:
    return run_once(1, [*TINY, "--train-iters", "6"])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("waits", [("save", 2), ("save", 4), ("save", 6)]),  # for steps that a save in step would keep from running
        ("fails once", [("save_failed", 2), ("save", 2), ("save", 4), ("save", 6)]),
        ("hangs once", [("save_failed", 2), ("save", 4), ("save", 6)]),
        ("fails", [("save_failed", 2), ("save_failed", 2), ("save", 4), ("save", 6)]),
        ("killed", [("save_failed", 2), ("save", 4), ("save", 6)]),
    ],
)
def test_a_run_goes_on_whatever_happens_to_its_writer(pools, undisturbed, tmp_path, how, expected):
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


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("fails", "the disk is full"),
        ("killed", "rank 1: the process that writes checkpoints was ended by SIGKILL"),
        ("no memory", "rank 1 cannot copy its part to host memory (Cannot allocate memory)"),
    ],
)
def test_a_failed_last_save_ends_with_a_message(pools: Pools, tmp_path: Path, how: str, reason: str) -> None:
    """Although it is rank 0 that commits: it does not wait for a writer that is gone."""
    began = time.monotonic()
    argv = [*TINY, "--train-iters", "2", "--tp", "2"]
    for error in pools(2).run(with_writer, argv, str(tmp_path), how):
        assert reason in error
    assert time.monotonic() - began < 120


def test_a_rank_whose_writer_is_done_goes_on_saying_that_it_waits(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(with_writer, [*TINY, "--train-iters", "2", "--tp", "2"], str(tmp_path), "is slow") == ["", ""]


def asked_in_a_save(argv: list[str], run_dir: str) -> str:
    """Train until rank 0 alone is asked to stop while the state of iteration 2 is copied; return why the run ends."""
    from megavlm.errors import Stopped
    from megavlm.train.hooks.saves import Saves

    save = Saves.save
    with asking_to_stop() as ask:

        def saving(self: Saves, position: Any, record: Any) -> None:
            save(self, position, record)
            if position.iteration == 2:
                ask()

        with mock.patch.object(Saves, "save", saving), pytest.raises(Stopped) as stopped:
            train(argv, run_dir)
    return str(stopped.value)


def test_a_request_to_one_rank_during_a_save_ends_the_run_on_all(pools: Pools, tmp_path: Path) -> None:
    told = pools(2).run(asked_in_a_save, [*TINY, "--train-iters", "6"], str(tmp_path))
    assert told == ["the test", "the test"]
    assert [iteration for iteration, _ in folders.complete(tmp_path / "checkpoints")] == [2]
    assert [record["iteration"] for record in metrics(tmp_path)] == [1, 2]


def with_a_commit_that_is_killed(argv: list[str], run_dir: str, where: str) -> None:
    """Train with a writer of rank 0 that is killed once: in the commit of iteration 2, or as it prunes after that."""
    import torch.distributed as dist

    from megavlm.checkpoint import folders

    module, name = {"in it": (folders, "write_manifest"), "after": (folders, "prune")}[where]
    original, killed, first = getattr(module, name), Path(run_dir) / "killed", dist.get_rank() == 0

    def killing(*args: Any, **kwargs: Any) -> Any:
        if first and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    with mock.patch.object(module, name, killing):
        train(argv, run_dir)


@pytest.mark.parametrize(("where", "counts"), [("in it", False), slow("after", True)])
def test_a_writer_that_dies_in_a_commit_is_replaced(pools: Pools, tmp_path: Path, where: str, counts: bool) -> None:
    """The save counts if the manifest is in place; the next one is whole, although its writer knows nothing yet."""
    pools(2).run(with_a_commit_that_is_killed, [*TINY, "--train-iters", "4", "--tp", "2"], str(tmp_path), where)
    assert kinds(tmp_path) == [("save" if counts else "save_failed", 2), ("save", 4)]
    assert (tmp_path / "killed").exists()
    found = folders.complete(tmp_path / "checkpoints")
    assert [iteration for iteration, _ in found] == ([2, 4] if counts else [4])
    assert all(manifest.damage(folder) is None for _, folder in found)
    assert not list((tmp_path / "checkpoints").glob("tmp-*"))


def plans(run_dir: str) -> list[tuple[bool, list[str]]]:
    """Save four times, at last with a tensor more on rank 1; return whether the ranks divide anew, and what this one
    writes.
    """
    import torch
    import torch.distributed as dist

    from megavlm import backend

    backend.activate()
    from megatron.core.dist_checkpointing import ShardedTensor

    from megavlm.backend import patches
    from megavlm.checkpoint.saving import Division

    told = patches.described_on_rank_0
    checked: list[int] = []

    def counted(state: Any) -> Any:
        own, of_all = told(state)
        checked.append(len([each for each in of_all if each is not None]))
        return own, of_all

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(patches, "described_on_rank_0", counted)
    division, rank, found = Division(), dist.get_rank(), []
    for number in range(4):
        names = [f"own{rank}", "shared", *(["new"] if number == 3 and rank == 1 else [])]
        state = {
            name: ShardedTensor.from_rank_offsets(
                name, torch.full((2, 3), float(number)), replica_id=(0, 0, rank if name == "shared" else 0)
            )
            for name in names
        }
        before = division._strategy
        share = division.share(state, group=dist.group.WORLD, metadata={})
        items = [(index.fqn, data) for items in share.files.values() for index, data in items]
        assert all(data.eq(number).all() for _, data in items)  # the values of this save
        assert (share.metadata is not None) == (rank == 0 and division._strategy is not before)
        found.append((division._strategy is not before, sorted(name for name, _ in items)))
    monkeypatch.undo()
    assert checked == [dist.get_world_size() if rank == 0 else 0] * 2, "rank 0 alone checks who writes what"
    return found


def test_ranks_tell_each_other_of_their_tensors_once(pools: Pools, tmp_path: Path) -> None:
    """And again when one of them has others: both must divide anew."""
    first, second = pools(2).run(plans, str(tmp_path))
    for each in (first, second):
        assert [anew for anew, _ in each] == [True, False, False, True]
        assert each[0][1] == each[1][1] == each[2][1]
    assert sorted(first[0][1] + second[0][1]) == ["own0", "own1", "shared"]
    assert sorted(first[3][1] + second[3][1]) == ["new", "own0", "own1", "shared"]


def test_no_async_save_waits(pools: Pools, undisturbed: Path, tmp_path: Path) -> None:
    pools(1).run(train, [*TINY, "--train-iters", "6", "--no-async-save"], str(tmp_path))
    assert without_wall_time(metrics(tmp_path)) == without_wall_time(metrics(undisturbed))
    assert [record["iteration"] for record in metrics(tmp_path) if "save_time_s" in record] == [3, 5]


def slowly(argv: list[str], output: str) -> None:
    """Run the program; it leaves a file at each phase of the save of iteration 4, and waits a little there."""
    from megavlm.checkpoint import folders, manifest, staging, writer

    folder = Path(output).parent

    def pausing(module: Any, name: str, phase: str, *, about: str = "0000004", after: str = "") -> None:
        """Let a function pause once when it returns, if it is `about` that, and the file `after` is there."""
        original = getattr(module, name)

        def paused(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if about in f"{args} {result}" and (folder / after).exists() and not (folder / phase).exists():
                (folder / phase).touch()
                time.sleep(0.3)
            return result

        setattr(module, name, paused)

    pausing(writer, "folder_of", "begun")
    pausing(writer, "items_at", "read", about="", after="begun")
    pausing(staging.Staging, "copy", "staged", about="", after="run/checkpoints/iter_0000002")
    pausing(manifest.SummingFile, "end_item", "writing", about="", after="read")
    pausing(writer, "write_share", "written")
    pausing(writer.Reports, "leave", "reported", about="", after="written")
    pausing(writer, "write_metadata", "described")
    pausing(folders, "write_manifest", "listed")
    pausing(Path, "rename", "pruning", about="tmp-iter_0000002", after="listed")
    pausing(folders, "prune", "committed", about="", after="listed")
    run_program(argv, output)


PHASES = ["staged", "writing", "written", "reported", "described", "listed", "pruning", "committed"]


@pytest.mark.parametrize("phase", fast_and_slow(["listed"], PHASES))
def test_killed_in_any_phase_of_a_save_the_run_goes_on_from_a_whole_checkpoint(undisturbed, tmp_path, phase):
    run_dir = tmp_path / "run"
    argv = [*TINY, "--train-iters", "6", "--run-dir", str(run_dir)]
    argv += ["--keep-checkpoints", "1"] if phase == "pruning" else []
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
    assert [iteration for iteration, _ in found] == {"committed": [2, 4], "pruning": [4]}.get(phase, [2])
    assert all(manifest.damage(folder) is None for _, folder in found)
    assert status_of(start_program(argv, tmp_path / "output")) == 0
    assert without_wall_time(metrics(run_dir)) == without_wall_time(metrics(undisturbed))
    assert not list((run_dir / "checkpoints").glob("tmp-*"))
