"""Validation: the loss of samples that are not trained on is the same on every layout, and training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megavlm.checkpoint import folders
from megavlm.data.loader import DataLoader
from megavlm.errors import Stopped, UserError
from megavlm.pipeline.schedule import Schedule
from megavlm.train.hooks.held_out import ValidationHook
from tests.support.covering import slow
from tests.support.data_files import sources_of, write_held_out
from tests.support.flags import DROPOUT
from tests.support.training import LEAN, asking_to_stop, metrics, train, without_wall_time

# Few steps of a high rate: each validation has another loss. Batches of 8 sequences, so that the last one is not full.
RUN = [
    *LEAN,
    *"--images-per-sample 1 --image-sizes --train-iters 4 --lr 1e-2 --lr-warmup-iters 0 --seq-length 96".split(),
    *"--global-batch-size 8 --packing-window 16 --num-workers 0 --eval-interval 2".split(),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_held_out(tmp_path_factory.mktemp("files"), samples=21, lines=11)


def sources(folder: Path, *, split: bool = False) -> list[str]:
    held = folder / "held"
    files = ["--validation", f"{held / 'chat.jsonl'},image_root={held / 'images'}", f"{held / 'book.txt'},name=text"]
    return [*sources_of(folder), *(["--validation-split", "0.25"] if split else files)]


def validated(run_dir: Path) -> list[dict[str, Any]]:
    """The iterations with a validation, and what they say of it."""
    return [
        {name: value for name, value in record.items() if name.startswith("validation/") or name == "iteration"}
        for record in metrics(run_dir)
        if "validation/loss" in record
    ]


def trained(run_dir: Path) -> list[dict[str, Any]]:
    """What the metrics say of training."""
    records = without_wall_time(metrics(run_dir))
    return [{name: value for name, value in each.items() if not name.startswith("validation/")} for each in records]


def assert_same_validation(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert [record.keys() for record in ours] == [record.keys() for record in theirs]
    for record, other in zip(ours, theirs, strict=True):
        for name, value in record.items():
            exact = name in ("iteration", "validation/trained_tokens")
            assert value == (other[name] if exact else pytest.approx(other[name], rel=1e-5)), name


@pytest.fixture(scope="module")
def one(run_once, folder: Path):
    """A run on one process with some flags."""
    return lambda flags="", split=False: run_once(1, [*RUN, *sources(folder, split=split), "--no-save", *flags.split()])


FROZEN = "--freeze vision projector"
LORA = "--lora-rank 4 --lora-targets language --freeze vision projector"


@pytest.mark.parametrize(
    ("world", "layout", "model"),
    [
        slow(4, "--tp 2 --pp 2", ""),
        (2, "--pp 2 --vpp 2 --mbs 2", ""),
        slow(2, "--data-parallel-sharding full --num-workers 1", ""),
        slow(4, "--pp 2 --placement colocated --encode-ahead", FROZEN),
        slow(4, "--tp 2 --data-parallel-sharding optimizer_gradients", LORA),
        slow(4, "--cp 2 --placement colocated --encode-ahead", FROZEN),
        slow(4, "--pp 2 --cp 2", "--set model.language.mtp_layers=1"),
    ],
)
def test_any_layout_measures_the_same(pools, folder, one, tmp_path, world, layout, model):
    pools(world).run(train, [*RUN, *sources(folder), "--no-save", *layout.split(), *model.split()], str(tmp_path))
    expected = validated(one(model))
    assert [record["iteration"] for record in expected] == [2, 4]
    assert {"validation/chat/loss", "validation/text/perplexity"} <= expected[0].keys()
    assert ("validation/mtp_loss" in expected[0]) == ("mtp" in model)
    assert expected[0]["validation/loss"] > 1.001 * expected[1]["validation/loss"], "each has its own weights"
    assert_same_validation(validated(tmp_path), expected)


@pytest.mark.slow
def test_a_split_is_the_same_on_another_layout_and_after_a_resume(pools, folder, one, tmp_path):
    argv = [*RUN, *sources(folder, split=True), "--save-interval", "2", "--keep-best", "validation/loss"]
    pools(2).run(train, [*argv, "--train-iters", "2", "--lr-decay-iters", "20"], str(tmp_path))
    pools(2).run(train, [*argv, "--tp", "2"], str(tmp_path))
    assert_same_validation(validated(tmp_path), validated(one(split=True)))
    assert [iteration for iteration, _ in folders.checkpoints(tmp_path / "checkpoints")] == [2, 4]
    with pytest.raises(AssertionError, match=r"--validation-split 0\.25, but this run has 0\.1"):
        pools(1).run(train, [*argv, "--validation-split", "0.1"], str(tmp_path))


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, DROPOUT),
        slow(2, [*DROPOUT, *"--precision bf16 --fp8 hybrid --fp8-recipe delayed --pp 2".split()]),
        slow(2, f"--tp 2 --placement colocated --encode-ahead {FROZEN}".split()),
    ],
)
def test_training_is_bit_identical_with_and_without(pools, folder, tmp_path, world, flags):
    """Answers to held-out prompts do not change a number of the training."""
    asked = "--eval-interval 1 --sample-interval 1 --set evaluation.sample_count=3 evaluation.sample_max_new_tokens=4"
    pools(world).run(train, [*RUN, *sources(folder), *flags, *asked.split()], str(tmp_path / "often"))
    never = [*sources_of(folder), *flags, "--eval-interval", "none"]
    pools(world).run(train, [*RUN, *never], str(tmp_path / "never"))
    assert len(validated(tmp_path / "often")) == 4
    assert len((tmp_path / "often/samples/answers.jsonl").read_text().splitlines()) == 5
    assert not (tmp_path / "never/samples").exists()
    assert trained(tmp_path / "often") == trained(tmp_path / "never")


def train_and_stop_while_validating(argv: list[str], run_dir: str, iteration: int) -> int:
    """Run until rank 0 is asked to stop in the validation after an iteration; return its batches after the request."""
    after, measured, losses = -1, ValidationHook.validate, Schedule.losses
    with asking_to_stop() as ask:

        def measuring(self, at):
            nonlocal after
            after = 0 if at == iteration else -1
            return measured(self, at)

        def computing(self, *args, **options):
            nonlocal after
            if after >= 0:
                ask()
                after += 1
            return losses(self, *args, **options)

        ways = patch.object(ValidationHook, "validate", measuring), patch.object(Schedule, "losses", computing)
        with ways[0], ways[1], pytest.raises(Stopped):
            train(argv, run_dir)
    return after


@pytest.mark.slow
def test_a_request_to_stop_ends_a_validation_and_the_run_goes_on_where_it_was(pools, folder, tmp_path):
    argv = [*RUN, *sources(folder), "--eval-interval", "1", "--save-interval", "0"]
    pools(2).run(train, [*argv, "--no-save"], str(tmp_path / "whole"))
    assert pools(2).run(train_and_stop_while_validating, argv, str(tmp_path / "halves"), 2) == [1, 1]
    assert [record["iteration"] for record in validated(tmp_path / "halves")] == [1]
    pools(2).run(train, argv, str(tmp_path / "halves"))
    assert [record["iteration"] for record in validated(tmp_path / "halves")] == [1, 3, 4]
    assert trained(tmp_path / "halves") == trained(tmp_path / "whole")
    assert validated(tmp_path / "halves")[1:] == validated(tmp_path / "whole")[2:]


def train_with_a_lost_disk(argv: list[str], run_dir: str) -> None:
    """Run with validation data of which the second batch of the first validation cannot be read."""
    following, batches = ValidationHook._next_batch, 0
    read = DataLoader.next_step

    def next_batch(self, loader):
        nonlocal batches
        batches += 1

        def failing(data_loader):
            if data_loader is loader and batches == 2:
                raise UserError("the disk is gone")
            return read(data_loader)

        with patch.object(DataLoader, "next_step", failing):
            return following(self, loader)

    with patch.object(ValidationHook, "_next_batch", next_batch):
        train(argv, run_dir)


def test_validation_data_that_cannot_be_read_are_left_out_and_the_next_time_begins_anew(pools, folder, one, tmp_path):
    pools(1).run(train_with_a_lost_disk, [*RUN, *sources(folder), "--no-save"], str(tmp_path))
    assert validated(tmp_path) == validated(one())[1:]
    assert trained(tmp_path) == trained(one())
