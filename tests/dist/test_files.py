"""The user's own data: any layout, worker count and interruption trains on the same samples, and bad ones are skipped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.data_files import sources_of, write_all
from tests.dist.pool import Pools
from tests.dist.training import SMALL, assert_same_curve, metrics, train, without_wall_time
from tools import prepare_data

# Packing on: about four samples a sequence. The images of the records are resized to the tower's 16 pixels.
FILES = [*SMALL, *"--images-per-sample 1 --image-sizes --train-iters 12 --seq-length 96 --packing-window 16 --num-workers 0 --lr-decay-iters 20".split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def whole(pools: Pools, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole")
    pools(1).run(train, [*FILES, *sources_of(folder), "--no-save"], str(run_dir))
    return run_dir


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (4, "--tp 2 --pp 2 --num-workers 1"),
        (2, "--mbs 2"),
        (2, "--pp 2 --vpp 2 --mbs 2"),
        pytest.param(4, "--tp 2 --pp 2 --placement colocated --vision-tp 2", marks=pytest.mark.slow),
        (2, "--tp 2 --placement colocated"),
    ]
)
def test_any_layout_trains_on_the_same_samples(
    pools: Pools, folder: Path, whole: Path, tmp_path: Path, world: int, layout: str
) -> None:
    pools(world).run(train, [*FILES, *sources_of(folder), *layout.split(), "--no-save"], str(tmp_path))
    ours, expected = metrics(tmp_path), metrics(whole)
    assert_same_curve(ours, expected)
    for record, other in zip(ours, expected, strict=True):
        assert record["packing_efficiency"] == other["packing_efficiency"] > 0.5
        assert record["loss_by_source"].keys() == {"train", "book"}
        for name, loss in record["loss_by_source"].items():
            expected_loss = other["loss_by_source"][name]
            assert loss is expected_loss is None or loss == pytest.approx(expected_loss, rel=1e-5)


def test_resume_is_exact_with_other_replicas_and_workers(
    pools: Pools, folder: Path, whole: Path, tmp_path: Path
) -> None:
    argv = [*FILES, *sources_of(folder)]
    pools(1).run(train, [*argv, "--train-iters", "5", "--num-workers", "2"], str(tmp_path / "one"))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    pools(1).run(train, argv, str(tmp_path / "one"))
    assert without_wall_time(metrics(tmp_path / "one")) == without_wall_time(metrics(whole))
    pools(2).run(train, argv, str(tmp_path / "two"))
    assert_same_curve(metrics(tmp_path / "two"), metrics(whole))


def test_bad_samples_are_skipped_and_counted(pools: Pools, folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "data"
    shutil.copytree(folder, damaged)
    images = sorted((damaged / "images").iterdir())
    images[0].unlink()
    images[2].write_bytes(images[2].read_bytes()[: images[2].stat().st_size // 2])
    lines = (damaged / "train.jsonl").read_bytes().splitlines()
    lines[3] = b"\xff\xfe{]"
    (damaged / "train.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    argv = [*FILES, *sources_of(damaged), "--no-save", "--tp", "2"]
    pools(2).run(train, argv, str(tmp_path / "run"))
    skipped = [json.loads(line) for line in (tmp_path / "run/skipped/replica-00000.jsonl").read_text().splitlines()]
    assert {"missing_file", "truncated", "not_a_record"} <= {skip["reason"] for skip in skipped}
    assert sum(record["skipped_samples"] for record in metrics(tmp_path / "run")) == len(skipped)
    assert all(record["loss"] > 0 for record in metrics(tmp_path / "run"))


@pytest.fixture(scope="module")
def tars(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of `folder` as WebDataset, by the tool."""
    out = tmp_path_factory.mktemp("tars") / "wds"
    argv = [str(folder / "train.jsonl"), str(out), "--image-root", str(folder / "images")]
    assert prepare_data.main(argv) == 0
    return out


def streamed(folder: Path, tars: Path) -> list[str]:
    sources = ["--sources", f"{tars},weight=3", str(folder / "book.txt"), "--tokenizer", str(folder / "tokenizer")]
    return [*FILES, *sources, "--train-iters", "8"]


def test_streams_resume_exactly_on_as_many_replicas(pools: Pools, folder: Path, tars: Path, tmp_path: Path) -> None:
    argv = streamed(folder, tars)
    pools(2).run(train, [*argv, "--no-save"], str(tmp_path / "whole"))
    pools(2).run(train, [*argv, "--train-iters", "3"], str(tmp_path / "halves"))
    shutil.copytree(tmp_path / "halves", tmp_path / "other")
    pools(2).run(train, [*argv, "--num-workers", "1"], str(tmp_path / "halves"))
    whole = metrics(tmp_path / "whole")
    assert without_wall_time(metrics(tmp_path / "halves")) == without_wall_time(whole)
    assert {name for record in whole for name, loss in record["loss_by_source"].items() if loss} == {"wds", "book"}
    with pytest.raises(AssertionError, match="as many|number of replicas"):
        pools(1).run(train, argv, str(tmp_path / "other"))


def test_too_many_bad_samples_end_the_run_with_a_checkpoint(pools: Pools, folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "data"
    shutil.copytree(folder, damaged)
    lines = (damaged / "train.jsonl").read_bytes().splitlines()
    (damaged / "train.jsonl").write_bytes(b"\n".join(lines[:20] + [b"{"] * 40) + b"\n")
    argv = [*FILES, *sources_of(damaged), "--packing-window", "64"]
    with pytest.raises(AssertionError, match="--max-bad-sample-rate 0.05"):
        pools(1).run(train, argv, str(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["iter_0000001"]
    pools(1).run(train, [*argv, "--max-bad-sample-rate", "0.9"], str(tmp_path / "run"))
    assert metrics(tmp_path / "run")[-1]["iteration"] == 12
