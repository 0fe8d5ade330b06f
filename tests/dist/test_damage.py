"""Damage to the newest of three checkpoints: it is named in one line, and the run goes on from the one before it."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megavlm.checkpoint import folders, writer
from megavlm.errors import UserError
from megavlm.train.engine import Engine
from tests.support.covering import slow
from tests.support.manifests import write_sums
from tests.support.pool import Pools
from tests.support.training import SHALLOW, metrics, of_kind, train, without_wall_time

TINY = [*SHALLOW, *"--save-interval 1 --keep-checkpoints 0".split()]


@pytest.fixture(scope="module")
def three(run_once) -> Path:
    """A run of one process with checkpoints of iterations 1, 2 and 3."""
    return run_once(1, [*TINY, "--train-iters", "3"])


@pytest.fixture(scope="module")
def undisturbed(run_once) -> Path:
    return run_once(1, [*TINY, "--no-save", "--save-interval", "0", *"--keep-checkpoints 2 --train-iters 4".split()])


def resume(argv: list[str], run_dir: str) -> tuple[str, str]:
    """Run the program's parts in this process; return what it printed and the user's error, if any."""
    printed, error = io.StringIO(), ""
    try:
        train(argv, run_dir, printed=printed)
    except UserError as raised:
        error = str(raised)
    return printed.getvalue(), error


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 64
    path.write_bytes(content)


def rewrite(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


def of_another_iteration(path: Path) -> None:
    shutil.copy(path.parent.with_name("iter_0000002") / path.name, path)


CASES = [
    ("items.json", cut),
    slow("items.json", Path.unlink),
    ("megavlm.json", Path.unlink),
    slow("megavlm.json", rewrite('{"format": 1}')),
    slow("__0_0.distcp", cut),
    slow("__0_0.distcp", Path.unlink),
    slow("__0_1.distcp", zero),
    ("__0_0.distcp", flip),
    ("__0_0.distcp", of_another_iteration),
    slow("state.json", empty),
    ("state.json", flip),
    slow("metadata.json", rewrite('{"sharded_backend": "other"}')),
    ("manifest.json", Path.unlink),
    slow("manifest.json", flip),
]


@pytest.mark.parametrize(("file", "damage"), CASES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_loaded(pools, three, undisturbed, tmp_path, file, damage):
    run_dir = tmp_path / "run"
    shutil.copytree(three, run_dir)
    newest = folders.folder_for(run_dir / "checkpoints", 3)
    damage(newest / file)
    ((printed, error),) = pools(1).run(resume, [*TINY, "--train-iters", "4"], str(run_dir))
    assert error == ""
    (line,) = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert "iter_0000003" in line
    # A bit of the manifest may be one of another file's checksum.
    assert file in line or (damage is flip and file == "manifest.json")
    assert without_wall_time(metrics(run_dir)) == without_wall_time(metrics(undisturbed))
    assert [iteration for iteration, _ in folders.complete(newest.parent)] == [1, 2, 3, 4]
    assert newest.with_name("damaged-iter_0000003").is_dir()  # not pruned, and not counted
    assert [event["reason"] for event in of_kind(run_dir, "damage")] == [line.removeprefix("warning: ")]


@pytest.mark.parametrize("file", ["__0_0.distcp", "state.json"])
def test_no_fallback_refuses_a_damaged_checkpoint(pools: Pools, three: Path, tmp_path: Path, file: str) -> None:
    shutil.copytree(three, tmp_path / "run")
    flip(tmp_path / "run/checkpoints/iter_0000003" / file)
    ((_, error),) = pools(1).run(resume, [*TINY, "--train-iters", "4", "--no-fallback"], str(tmp_path / "run"))
    assert "--no-fallback" in error
    assert file in error
    assert "\n" not in error


def test_where_none_is_whole_the_run_does_not_begin_anew(pools: Pools, three: Path, tmp_path: Path) -> None:
    for number, file in ((1, "__0_1.distcp"), (2, "__0_0.distcp"), (3, "metadata.json")):
        shutil.copytree(three / f"checkpoints/iter_000000{number}", tmp_path / f"checkpoints/iter_000000{number}")
        flip(tmp_path / f"checkpoints/iter_000000{number}" / file)
    ((printed, error),) = pools(1).run(resume, [*TINY, "--train-iters", "4"], str(tmp_path))
    assert "iter_0000001 is damaged: __0_1.distcp" in error
    assert printed.count("warning: ") == 2


@pytest.mark.parametrize("folder", ["", "checkpoints/iter_0000003"])
def test_what_is_loaded_of_another_run_is_verified(pools: Pools, three: Path, tmp_path: Path, folder: str) -> None:
    shutil.copytree(three, tmp_path / "first")
    flip(tmp_path / "first/checkpoints/iter_0000003/__0_0.distcp")
    argv = [*TINY, "--train-iters", "4", "--load", str(tmp_path / "first" / folder)]
    ((printed, error),) = pools(1).run(resume, argv, str(tmp_path / "second"))
    if folder.endswith("3"):  # this one was asked for
        assert "iter_0000003 is damaged" in error
    else:
        assert "Going on from iter_0000002" in printed
        assert (tmp_path / "first/checkpoints/iter_0000003").is_dir()  # another run's folder is left alone


def test_all_ranks_leave_out_what_one_of_them_finds_damaged(pools: Pools, tmp_path: Path) -> None:
    argv = [*TINY, "--tp", "2"]
    pools(2).run(train, [*argv, "--train-iters", "4"], str(tmp_path / "whole"))
    pools(2).run(train, [*argv, "--train-iters", "3"], str(tmp_path / "run"))
    flip(tmp_path / "run/checkpoints/iter_0000003/__1_0.distcp")
    first, second = pools(2).run(resume, [*argv, "--train-iters", "4"], str(tmp_path / "run"))
    assert first[1] == second[1] == ""
    assert "__1_0.distcp is damaged" in first[0]
    assert without_wall_time(metrics(tmp_path / "run")) == without_wall_time(metrics(tmp_path / "whole"))


@pytest.mark.parametrize("copied", [True, False])
def test_a_checkpoint_under_another_number_says_so(pools: Pools, three: Path, tmp_path: Path, copied: bool) -> None:
    root = tmp_path / "run/checkpoints"
    shutil.copytree(three / "checkpoints/iter_0000003", root / "iter_0000009")
    if copied:
        shutil.copytree(root / "iter_0000009", root / "iter_0000003")
    ((printed, error),) = pools(1).run(resume, [*TINY, "--train-iters", "4"], str(tmp_path / "run"))
    assert error == ""
    told = "a copy of iter_0000003, and now damaged-iter_0000009" if copied else "of iteration 3, and is now iter_"
    assert f"iter_0000009 is {told}" in printed
    assert [iteration for iteration, _ in folders.complete(root)] == [3, 4]


def test_what_is_strange_among_checkpoints_is_set_aside_or_ignored(pools: Pools, three: Path, tmp_path: Path) -> None:
    """`checkpoints` is a link, and so is a file of the newest checkpoint; tensors may not lead out of the folder."""
    root, run_dir = tmp_path / "elsewhere", tmp_path / "run"
    shutil.copytree(three / "checkpoints", root)
    run_dir.mkdir()
    (run_dir / "checkpoints").symlink_to(root)
    for name in ("iter_0000004", "iter_0000005", "tmp-iter_0000006"):
        (root / name).mkdir()
    for folder in ("iter_0000003", "iter_0000005"):
        (root / folder / "notes").write_text("mine")
    linked(root / "iter_0000003/state.json", tmp_path / "state.json")
    ((printed, error),) = pools(1).run(resume, [*TINY, "--train-iters", "4"], str(run_dir))
    assert error == ""
    assert "iter_0000005 is damaged, and left out: it has no manifest.json" in printed
    assert f"resumed from {run_dir}/checkpoints/iter_0000003 at iteration 3" in printed
    assert [iteration for iteration, _ in folders.complete(root)] == [1, 2, 3, 4]
    assert (root / "damaged-iter_0000005/notes").exists()
    assert not list(root.glob("tmp-*"))
    linked(root / "iter_0000004/__0_0.distcp", tmp_path / "tensors")
    ((_, error),) = pools(1).run(resume, [*TINY, "--train-iters", "5"], str(run_dir))
    assert "a link that leads out of its folder" in error
    assert "\n" not in error


def linked(path: Path, moved: Path) -> None:
    path.rename(moved)
    path.symlink_to(moved)


def test_a_foreign_state_is_named(pools: Pools, three: Path, tmp_path: Path) -> None:
    """Whoever writes the manifest anew may put any values into the file."""
    shutil.copytree(three / "checkpoints/iter_0000003", newest := tmp_path / "run/checkpoints/iter_0000003")
    whole = json.loads((newest / "state.json").read_text())
    for changed in ({}, {**whole, "position": {"x": 1}}, {**whole, "optimizer": {}}):
        (newest / "state.json").write_text(json.dumps(changed))
        write_sums(newest)
        ((_, error),) = pools(1).run(resume, [*TINY, "--train-iters", "4"], str(tmp_path / "run"))
        assert "state.json" in error
        assert "use another checkpoint" in error
        assert "\n" not in error


def save_on_a_full_disk(argv: list[str], run_dir: str) -> str:
    """Save where no file may be larger than 20,000 bytes; return the user's error."""
    import resource

    limited = writer.write_share

    def write_share(*args: Any, **kwargs: Any) -> Any:  # in the process that writes
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        return limited(*args, **kwargs)

    with patch.object(writer, "write_share", write_share):
        return resume(argv, run_dir)[1]


def test_a_save_that_fails_says_why_in_words(pools: Pools, tmp_path: Path) -> None:
    for error in pools(2).run(save_on_a_full_disk, [*TINY, "--train-iters", "1"], str(tmp_path)):
        assert "File too large" in error
        assert ".distcp" in error
        assert "unexpected pos" not in error


def test_a_resume_with_other_data_is_refused_or_accepted_by_name(pools: Pools, three: Path, tmp_path: Path) -> None:
    shutil.copytree(three, tmp_path / "run")
    argv = [*TINY, "--train-iters", "4", "--seed", "99"]
    names = ("config.yaml", "plan.json", "environment.json")
    before = [(tmp_path / "run" / name).read_text() for name in names]
    ((_, error),) = pools(1).run(resume, argv, str(tmp_path / "run"))
    assert "--seed 1234, but this run has 99" in error
    assert "--accept-changed-data" in error
    assert [(tmp_path / "run" / name).read_text() for name in names] == before  # these options have never run
    ((printed, error),) = pools(1).run(resume, [*argv, "--accept-changed-data"], str(tmp_path / "run"))
    assert error == ""
    assert "--seed 1234, but this run has 99" in printed
    assert "seed: 99" in (tmp_path / "run/config.yaml").read_text()
    assert len(metrics(tmp_path / "run")) == 4


def poison(argv: list[str], run_dir: str) -> tuple[int, str]:
    """Train with a NaN in one of rank 1's moments after iteration 2; return the exit status and the user's error."""
    steps = []
    train_step = Engine.train_step

    def poisoned(self, *args, **kwargs):
        result = train_step(self, *args, **kwargs)
        steps.append(result)
        if len(steps) == 2 and dist.get_rank() == 1:
            state = next(iter(self.optimizer.chained_optimizers[0].optimizer.state.values()))
            state["exp_avg"].view(-1)[-1] = float("nan")
        return result

    with patch.object(Engine, "train_step", poisoned), pytest.raises(UserError) as raised:
        train(argv, run_dir)
    return raised.value.status, str(raised.value)


@pytest.mark.parametrize("flags", ["", slow("--no-async-save")])
def test_weights_that_are_not_finite_are_never_saved(pools: Pools, tmp_path: Path, flags: str) -> None:
    argv = [*TINY, *"--train-iters 3 --tp 2 --keep-checkpoints 1".split(), *flags.split()]
    for status, error in pools(2).run(poison, argv, str(tmp_path)):
        assert status == 3
        assert "is not finite after iteration 2" in error
        assert "iter_0000001" in error
        assert "\n" not in error
    assert [iteration for iteration, _ in folders.complete(tmp_path / "checkpoints")] == [1]
