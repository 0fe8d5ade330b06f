"""What is held out depends on what a record says, and on nothing else; it is never trained on."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config, DatasetConfig
from megavlm.data import file_source
from megavlm.data.collate import CollateSpec
from megavlm.data.file_source import FilesSource
from megavlm.data.records.containers import is_held_out, key_of
from megavlm.data.sampler import Windows
from megavlm.data.survey import data_table, run_length, with_counted_length
from megavlm.errors import UserError
from tests.support.data_files import record, sources_of, write_all
from tests.support.training import SMALL

texts = st.text(max_size=20)
fractions = st.floats(0, 1, exclude_max=True)


@given(texts, texts, st.integers(), fractions, fractions)
def test_only_what_a_record_says_counts(question: str, answer: str, number: int, one: float, other: float) -> None:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    key = key_of({"conversations": turns, "image": "a.png", "id": number})
    assert key == key_of({"image": "a.png", "conversations": [dict(reversed(turn.items())) for turn in turns]})
    assert key != key_of({"conversations": turns, "image": "b.png"})
    assert key != key_of({"conversations": turns[::-1], "image": "a.png"})
    less, more = sorted((one, other))
    assert is_held_out(key, more) or not is_held_out(key, less), "a larger fraction holds out the same and more"
    assert not is_held_out(key, 0)


def test_the_fraction_is_the_one_asked_for() -> None:
    held = sum(is_held_out(key_of({"text": f"line {number}"}), 0.1) for number in range(20_000))
    assert held == pytest.approx(2000, abs=4 * (20_000 * 0.1 * 0.9) ** 0.5)


@given(st.binary(), st.recursive(st.none() | st.text(), st.lists))
def test_any_record_has_a_key(image: bytes, strange: Any) -> None:
    assert len(key_of({"text": "a", "image": image, "images": [{"bytes": image}, strange]})) == 8
    assert not is_held_out(key_of(strange), 0.999999)


FLAGS = (*SMALL[2:], *"--seq-length 96 --packing-window 16 --num-workers 0 --validation-split 0.3".split())


def said(source: FilesSource, sample_id: Any) -> str:
    return repr([turn.parts for turn in source.conversation(sample_id)[0].turns])


def sides(files: list[Path], tokenizer: Path, *flags: str) -> tuple[set[str], set[str]]:
    """What is trained on in the first two epochs, and what is held out."""
    config = parse([*FLAGS, "--datasets", *map(str, files), "--tokenizer", str(tokenizer), "--epochs", "2", *flags])
    source = FilesSource(config)
    held_out = {said(source, sample) for sample in source.validation_samples(config)}
    sampler = source.sampler(config, source.collator(CollateSpec.of(config, source)))
    place, trained = sampler.start, set[str]()
    while place["window"] < 28:  # 4 epochs of 100: all of each data set, whose weights are equal
        batch = sampler.batch_at(place)
        place = batch.after
        trained |= {said(source, segment.sample_id) for row in batch.sequences for segment in row}
    sampler.close()
    return trained, held_out


def test_names_of_pairs_do_not_count() -> None:
    """Copies of a record have names of their own, and are on the same side nevertheless."""
    pair = {"query": "a cat", "positives": [{"image": "cat.png"}], "negatives": ["a dog"]}
    assert key_of({**pair, "id": "cat-1"}) == key_of({**pair, "ids": ["cat-2", "dog-1"]}) == key_of(pair)
    assert key_of({**pair, "negatives": ["a cow"]}) != key_of(pair)


def test_no_order_epoch_copy_or_neighbour_moves_a_sample_to_the_other_side(tmp_path: Path) -> None:
    write_all(tmp_path, samples=1)
    own, book, tokenizer = tmp_path / "own.jsonl", tmp_path / "book.txt", tmp_path / "tokenizer"
    book.write_text("\n".join(f"a cat runs {number} times" for number in range(20)) + "\n")
    rows = [record(f"what is {number} ?") for number in range(50)]
    own.write_text("\n".join(rows) + "\n")
    trained, held_out = sides([own, book], tokenizer)
    assert not trained & held_out
    assert len(trained | held_out) == 70, "each record is on a side"
    assert 10 < len(held_out) < 32

    mixed = tmp_path / "mixed.jsonl"
    copies = [json.dumps({**json.loads(row), "id": "copy"}) for row in rows[::2]]
    mixed.write_text("\n".join([*reversed(rows), *copies, *(record(f"new {n} ?") for n in range(10))]) + "\n")
    for flags in (["--no-shuffle"], ["--seed", "5", "--no-packing"]):
        again, out = sides([book, mixed], tokenizer, *flags)
        assert not again & out
        assert held_out <= out
        assert trained <= again


def test_a_split_without_a_sample_is_refused(tmp_path: Path) -> None:
    write_all(tmp_path, samples=1)
    flags = ["--datasets", str(tmp_path / "book.txt"), "--tokenizer", str(tmp_path / "tokenizer")]
    config = parse([*FLAGS, *flags, "--validation-split", "0.0001"])
    with pytest.raises(UserError, match=r"--validation-split 0\.0001 holds out none of 20 records: raise it"):
        FilesSource(config).validation_samples(config)


def test_samples_that_leave_room_are_not_counted_as_if_they_were_cut(tmp_path: Path) -> None:
    write_all(tmp_path, samples=1)
    (tmp_path / "book.txt").write_text("a cat runs\n" * 100)
    flags = ["--datasets", str(tmp_path / "book.txt"), "--tokenizer", str(tmp_path / "tokenizer")]
    config = parse([*FLAGS, *flags, "--validation-split", "0"])
    length = len(FilesSource(config).encode(0).samples[0].tokens)
    config = parse([*FLAGS, *flags, "--validation-split", "0", "--seq-length", str(3 * length - 1)])
    table = data_table(config, FilesSource(config))
    assert float(table.rpartition("samples in a sequence: about ")[2]) == pytest.approx(2, rel=0.05)


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
