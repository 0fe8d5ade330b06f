"""Epochs: each record once before any comes twice, and as many iterations as they need."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config, DatasetConfig
from megavlm.data import file_source
from megavlm.data.collate import CollateSpec
from megavlm.data.file_source import FilesSource
from megavlm.data.sampler import Windows
from megavlm.data.survey import data_table, run_length, with_counted_length
from megavlm.errors import UserError
from tests.support.data_files import sources_of, write_all
from tests.support.training import SMALL


@given(st.integers(1, 50), st.integers(1, 500))
def test_windows_of_epochs_divide_each_epoch_evenly(size: int, epoch: int) -> None:
    windows = Windows(size, epoch, within_epochs=True)
    parts = windows.per_epoch
    for first in (0, 1, 7):
        ranges = [windows.samples(number) for number in range(first * parts, (first + 1) * parts)]
        assert [sample for each in ranges for sample in each] == list(range(first * epoch, (first + 1) * epoch))
        assert max(map(len, ranges)) <= min(size, min(map(len, ranges)) + 1)
        assert windows.epochs(first * parts) == first


def test_a_place_between_windows_is_a_fraction_of_an_epoch() -> None:
    assert Windows(20, 50).epochs(2, 0.5) == 1.0, "windows as they come, the third of which ends after the epoch"
    assert Windows(20, 50, within_epochs=True).epochs(2, 0.5) == pytest.approx((33 + 8.5) / 50)
    assert Windows(20).epochs(2) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("epochs"), samples=50)


def config_of(folder: Path, flags: str) -> Config:
    one = [*sources_of(folder)[:2], *sources_of(folder)[-2:]]  # one data set, each record of which comes once an epoch
    return parse([*SMALL[2:], *one, *"--seq-length 96 --packing-window 16 --num-workers 0".split(), *flags.split()])


@pytest.mark.parametrize("flags", ["--epochs 2", "--epochs 2.5 --no-packing", "--epochs 3 --packing-window 2048"])
def test_the_run_ends_where_its_epochs_do(folder: Path, flags: str) -> None:
    config = config_of(folder, flags)
    source = FilesSource(config)
    length = run_length(config, source)
    assert length.samples == 50
    assert length.measured is None

    sampler = source.sampler(config, source.collator(CollateSpec.of(config, source)))
    place, seen, done = sampler.start, Counter[int](), 0.0
    for _ in range(length.iterations):
        before, batch = done, sampler.batch_at(place)
        place, done = batch.after, batch.epochs or 0.0
        seen.update({s.sample_id for row in batch.sequences for s in row})  # a split record may come in two pieces
    sampler.close()
    assert before < config.train.epochs <= done < config.train.epochs + (done - before)
    times = Counter(source.order.record(sample).record for sample in seen if sample < 100)
    assert set(times.values()) == {2}, "each record of the first two epochs comes twice"


def test_an_epoch_has_each_record_of_several_data_sets_once(folder: Path) -> None:
    one = config_of(folder, "--epochs 1")
    small = folder / "small.jsonl"
    small.write_text("".join((folder / "train.jsonl").read_text().splitlines(keepends=True)[:3]))
    two = (*one.data.datasets, DatasetConfig(path=str(small), image_root=str(folder / "images")))
    for weights in ((None, None), (1.0, 1.0)):
        datasets = tuple(replace(each, weight=weight) for each, weight in zip(two, weights, strict=True))
        config = replace(one, data=replace(one.data, datasets=datasets))
        source = FilesSource(config)
        windows = source.windows(config)
        read = [source.order.record(number) for w in range(windows.per_epoch) for number in windows.samples(w)]
        told = data_table(with_counted_length(config, source), source)
        if weights == (None, None):
            assert len({(ref.source, ref.record) for ref in read}) == 53
            assert re.search(r"train +50 +94.3% +about 1.1\nsmall +3 +5.7% +about 1.1\n", told), "in whole steps"
            assert "warning" not in told
        else:
            assert "with weights an epoch does not have each record once" in told


def test_many_records_are_estimated_from_the_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folder, "--epochs 20 --no-packing")
    source = FilesSource(config)
    exact = run_length(config, source)
    monkeypatch.setattr(file_source, "MEASURED", 25)
    about = run_length(config, source)
    assert (exact.measured, about.measured) == (None, 37), "three even windows of 50, and the fourth is of epoch 2"
    assert about.iterations == pytest.approx(exact.iterations, rel=0.1)
    assert "counted" in exact.line(config)
    one = replace(config, train=replace(config.train, epochs=1.0, global_batch_size=1))
    assert replace(exact, iterations=1).line(one).startswith("--epochs 1: 1 iteration of 1 sequence (counted)")
    assert "estimated from the first 37 samples" in about.line(config)


def test_data_without_a_usable_sample_have_no_epochs(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"conversations": [{"from": "human", "value": "cat"}]}) + "\n")
    config = parse([*SMALL[2:], "--datasets", str(bad), *sources_of(folder)[-2:], "--epochs", "1"])
    with pytest.raises(UserError, match="--epochs: none of the first 1 samples can be used"):
        run_length(config, FilesSource(config))
