"""What is held out depends on what a record says, and on nothing else; it is never trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm.command_line.parsing import parse
from megavlm.data.collate import CollateSpec
from megavlm.data.file_source import FilesSource
from megavlm.data.records.containers import is_held_out, key_of
from megavlm.data.survey import data_table
from megavlm.errors import UserError
from tests.support.data_files import record, write_all
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
