"""The user's own data: any layout, worker count and interruption trains on the same samples; bad ones are skipped."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megavlm.data.broadcast import ReplicaBroadcast
from megavlm.data.file_source import FilesSource
from megavlm.data.loader import DataLoader, RankLoader
from megavlm.data.types import StepData
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.programs import prepare as prepare_data
from megavlm.train.run import Run
from tests.support.covering import slow
from tests.support.data_files import sources_of, write_all
from tests.support.pool import Pools
from tests.support.training import LEAN, assert_same_curve, metrics, train, without_wall_time

# Packing on: about four samples a sequence. The images of the records are resized to the tower's 16 pixels.
FILES = [
    *LEAN,
    *"--images-per-sample 1 --image-sizes --train-iters 8 --seq-length 96".split(),
    *"--packing-window 16 --num-workers 0 --lr-decay-iters 20".split(),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def whole(run_once, folder: Path) -> Path:
    return run_once(1, [*FILES, *sources_of(folder), "--no-save"])


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, "--tp 2 --num-workers 1"),
        slow(4, "--tp 2 --pp 2 --num-workers 1"),
        slow(2, "--mbs 2"),
        (2, "--pp 2 --vpp 2 --mbs 2"),
        slow(4, "--tp 2 --pp 2 --placement colocated --vision-tp 2"),
        slow(2, "--tp 2 --placement colocated"),
    ],
)
def test_any_layout_trains_on_the_same_samples(pools, folder, whole, tmp_path, world, layout):
    pools(world).run(train, [*FILES, *sources_of(folder), *layout.split(), "--no-save"], str(tmp_path))
    ours, expected = metrics(tmp_path), metrics(whole)
    assert_same_curve(ours, expected)
    for record, other in zip(ours, expected, strict=True):
        assert record["packing_efficiency"] == other["packing_efficiency"] > 0.5
        assert record["samples"] == other["samples"] > record["skipped_samples"] == 0
        assert record["samples_per_second"] == record["samples"] / record["step_time_s"]
        assert record["loss_by_source"].keys() == {"train", "book"}
        for name, loss in record["loss_by_source"].items():
            expected_loss = other["loss_by_source"][name]
            assert loss is expected_loss is None or loss == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.slow
def test_epochs_end_alike_on_another_layout_and_after_a_resume(pools: Pools, folder: Path, tmp_path: Path) -> None:
    argv = [*FILES, *sources_of(folder), *"--train-iters none --save-interval 0 --epochs".split()]
    pools(1).run(train, [*argv, "2", "--no-save"], str(tmp_path / "whole"))
    pools(2).run(train, [*argv, "1"], str(tmp_path / "halves"))
    pools(2).run(train, [*argv, "2", "--tp", "2"], str(tmp_path / "halves"))
    whole, halves = metrics(tmp_path / "whole"), metrics(tmp_path / "halves")
    assert_same_curve(halves, whole)
    places = [record["epoch"] for record in whole]
    assert places == [record["epoch"] for record in halves] == sorted(places)
    assert places[-2] < 2 <= places[-1] < 2.25
    with pytest.raises(AssertionError, match="with --epochs in place of --train-iters"):
        pools(1).run(train, [*FILES, *sources_of(folder), "--train-iters", "40"], str(tmp_path / "halves"))


def complaint() -> str:
    """What this rank hears where the first one's data are at fault."""

    def read():
        assert dist.get_rank() == 0, "only one rank reads"
        raise UserError("ein Bär fraß train.jsonl")

    exchange = ReplicaBroadcast(dist.group.WORLD, dist.group.WORLD, vision_group=None, device=torch.device("cpu"))
    try:
        exchange.share(read)
    except UserError as error:
        return str(error)
    return "nothing"


def test_every_rank_hears_what_is_wrong_with_the_data(pools: Pools) -> None:
    assert pools(2).run(complaint) == ["ein Bär fraß train.jsonl"] * 2


def heard(audio_ranks: tuple[int, ...] | int) -> list[int]:
    """Return the frames of the sounds whose mel features reach this rank; `audio_ranks` may be a number of ranks that
    are one colocated encoder.
    """
    import torch
    import torch.distributed as dist

    from megavlm.config.schema import AudioConfig, ModelConfig
    from megavlm.data.broadcast import ReplicaBroadcast
    from megavlm.data.costs import ImageAssignment
    from megavlm.inputs.batch import SoundBatch
    from megavlm.rules.defaults import resolve_model
    from tests.support.micro_batch import micro_batch

    mels = torch.arange(26.0).view(13, 2)
    sounds = SoundBatch((9, 4), mels, torch.tensor([3, 4, 7]), torch.arange(3))
    batches = [replace(micro_batch(1), features=None, sounds=each) for each in (sounds, None)]
    world = dist.group.WORLD
    to: dict[str, Any] = {"audio_ranks": audio_ranks}
    if isinstance(audio_ranks, int):
        model = resolve_model(ModelConfig(audio=AudioConfig(num_layers=1), audio_token=9))
        to = {"assignment": ImageAssignment(model, 4, audio_ranks)}
    exchange = ReplicaBroadcast(world, world, vision_group=None, device=torch.device("cpu"), **to)
    step = exchange.share(lambda: StepData(batches, read=1, skipped=(), imbalance=None))
    assert step.batches[1].sounds is None
    found = step.batches[0].sounds
    if found.mels.is_meta:
        return []
    return [
        len(mine) for mine, all_ in zip(found.mels.split((9, 4)), mels.split((9, 4)), strict=True) if mine.equal(all_)
    ]


@pytest.mark.parametrize(
    ("audio_ranks", "expected"),  # the first rank reads, and so has all
    [
        ((), [[9, 4], [], [], []]),
        ((1, 2), [[9, 4], [9, 4], [9, 4], []]),
        ((0, 1, 2, 3), [[9, 4]] * 4),
        (1, [[9, 4], [], [9], [4]]),  # the first two have an image
        (2, [[9, 4], [9], [4], [4]]),
    ],
)
def test_mel_features_reach_the_ranks_that_encode_sounds_alone(pools: Pools, audio_ranks, expected) -> None:
    assert pools(4).run(heard, audio_ranks) == expected


@pytest.mark.slow
def test_resume_is_exact_with_other_replicas_and_workers(pools, folder, whole, tmp_path):
    argv = [*FILES, *sources_of(folder)]
    pools(1).run(train, [*argv, "--train-iters", "3", "--num-workers", "2"], str(tmp_path / "one"))
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
    pools(2).run(train, [*FILES, *sources_of(damaged), "--no-save", "--tp", "2"], str(tmp_path / "run"))
    skipped = [json.loads(line) for line in (tmp_path / "run/skipped/replica-00000.jsonl").read_text().splitlines()]
    assert {"missing_file", "truncated", "not_a_record"} <= {skip["reason"] for skip in skipped}
    assert sum(record["skipped_samples"] for record in metrics(tmp_path / "run")) == len(skipped)
    assert all(record["loss"] > 0 for record in metrics(tmp_path / "run"))


def train_where_rank_1_loses_a_sample(argv: list[str], run_dir: str) -> list[str]:
    """Return what the run says."""
    conversation, said = FilesSource.conversation, list[str]()

    def found(self: FilesSource, sample_id: int) -> Any:
        if dist.get_rank() == 1 and sample_id == 40:
            raise BadSample(Reason.MISSING, "the disk of this machine hangs")
        return conversation(self, sample_id)

    say = patch.object(Run, "say", lambda self, text: said.append(text))
    with patch.object(FilesSource, "conversation", found), say:
        train(argv, run_dir)
    return said


def test_replicas_that_read_other_samples_are_told(pools: Pools, folder: Path, tmp_path: Path) -> None:
    argv = [*FILES, *sources_of(folder), "--no-save"]
    said, _ = pools(2).run(train_where_rank_1_loses_a_sample, argv, str(tmp_path))
    (line,) = (line for line in said if "model replicas read different samples" in line)
    assert 1 < int(line.split()[3]) < 8, line


@pytest.mark.slow
def test_tars_resume_exactly_and_on_other_replicas(pools: Pools, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "wds"
    assert prepare_data.main([f"{folder / 'train.jsonl'},image_root={folder / 'images'}", str(out)]) == 0
    sources = ["--datasets", f"{out},weight=3", str(folder / "book.txt"), "--tokenizer", str(folder / "tokenizer")]
    argv = [*FILES, *sources, "--train-iters", "6"]
    pools(2).run(train, [*argv, "--no-save"], str(tmp_path / "whole"))
    pools(2).run(train, [*argv, "--train-iters", "3"], str(tmp_path / "halves"))
    shutil.copytree(tmp_path / "halves", tmp_path / "other")
    pools(2).run(train, [*argv, "--num-workers", "1"], str(tmp_path / "halves"))
    whole = metrics(tmp_path / "whole")
    assert without_wall_time(metrics(tmp_path / "halves")) == without_wall_time(whole)
    assert {name for record in whole for name, loss in record["loss_by_source"].items() if loss} == {"wds", "book"}
    pools(1).run(train, argv, str(tmp_path / "other"))
    assert_same_curve(metrics(tmp_path / "other"), whole)


def test_too_many_bad_samples_end_the_run_and_leave_nothing_in_the_way(pools, folder, tmp_path):
    damaged = tmp_path / "data"
    shutil.copytree(folder, damaged)
    lines = (damaged / "train.jsonl").read_bytes().splitlines()
    (damaged / "train.jsonl").write_bytes(b"\n".join(lines[:20] + [b"{"] * 40) + b"\n")
    argv = [*FILES, *sources_of(damaged), "--packing-window", "64"]
    one_step = "--train-iters 1 --lr-warmup-iters 0".split()  # the last is judged, too
    with pytest.raises(AssertionError, match=r"--max-bad-sample-rate 0\.05: \d+ × not_a_record, as train.jsonl:\d+: "):
        pools(1).run(train, [*argv, *one_step], str(tmp_path / "run"))
    assert not list((tmp_path / "run/checkpoints").glob("*"))
    mended = ["--max-bad-sample-rate", "0.9", "--seq-length", "128", "--packing-window", "32"]
    pools(1).run(train, [*argv, *mended], str(tmp_path / "run"))
    assert metrics(tmp_path / "run")[-1]["iteration"] == 8


def collectives_of_next_steps(argv: list[str], run_dir: str, ready: bool) -> list[int]:
    """Train, and return how often each step had to be received when it began. `ready`: its data were, or were not."""
    counts, calls = [], []
    with pytest.MonkeyPatch.context() as patch:
        broadcast, next_step = dist.broadcast, DataLoader.next_step

        def counted(self: DataLoader) -> StepData:
            calls.clear()
            step = next_step(self)
            counts.append(len(calls))
            return step

        patch.setattr(dist, "broadcast", lambda *args, **kwargs: (calls.append(1), broadcast(*args, **kwargs))[1])
        patch.setattr(DataLoader, "next_step", counted)
        if ready:
            patch.setattr(RankLoader, "is_ahead", lambda self: self.failure_ahead(unless=lambda: False) is None)
        else:
            patch.setattr(RankLoader, "is_ahead", lambda self: False)
        train(argv, run_dir)
    return counts


@pytest.mark.parametrize("ready", [True, False])
def test_data_of_a_step_are_shared_during_the_one_before_and_are_no_part_of_the_position(
    pools: Pools, folder: Path, whole: Path, tmp_path: Path, ready: bool
) -> None:
    argv = [*FILES, *sources_of(folder), "--tp", "2", "--save-interval", "2"]
    at_once, later = [2, 0, 0], [2, 2, 2]  # a header and a message
    for counts in pools(2).run(collectives_of_next_steps, [*argv, "--train-iters", "3"], str(tmp_path), ready):
        assert counts == (at_once if ready else later)
    if ready:
        shutil.rmtree(tmp_path / "checkpoints/iter_0000003")  # the one before was saved with the next data at hand
        pools(2).run(train, [*argv, "--train-iters", "5"], str(tmp_path))
        assert_same_curve(metrics(tmp_path), metrics(whole)[:5])
