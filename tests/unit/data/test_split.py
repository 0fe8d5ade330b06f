"""What is held out depends on what a record says alone; which prompts are chosen of it, and where they end."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config, DatasetConfig
from megavlm.data import file_source, survey
from megavlm.data.collate import CollateSpec
from megavlm.data.file_source import FilesSource
from megavlm.data.prompts import choose_prompts
from megavlm.data.records.containers import is_held_out, key_of
from megavlm.data.sample_order import in_turn
from megavlm.data.sampler import Windows
from megavlm.data.source import HeldOutPrompt
from megavlm.data.survey import data_table, loading_line, run_length, with_counted_length
from megavlm.data.types import HeldOut
from megavlm.errors import UserError
from megavlm.rules.defaults import resolve
from tests.support.data_files import WORDS, record, sources_of, write_all
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


@pytest.mark.parametrize(
    ("step", "flags", "replicas", "said"),
    [
        (16, "", 1, "prepares a step in 16 s; it trains for 16 s"),
        (2.5, "", 1, "prepares a step in 16 s; it trains for 2.5 s: --num-workers 7 would suffice"),
        (2.5, "", 4, "prepares a step in 10 s; it trains for 2.5 s: --num-workers 4 would suffice"),
        (12, "--packing-window 100", 1, "prepares a step in 12 s; it trains for 12 s"),  # of 50 records
        (1, "", 1, "prepares a step in 16 s; it trains for 1 s: no number suffices, so make images or --mbs smaller"),
    ],
)
def test_a_dry_run_says_how_many_workers_keep_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: float, flags: str, replicas: int, said: str
) -> None:
    """By a clock that says that each of 64 samples takes a second to encode, and one to load."""
    monkeypatch.setattr(survey, "perf_counter", chain([0.0, 64.0], map(float, count(100))).__next__)
    config = config_of(folder, f"--no-packing --global-batch-size 8 --micro-batch-size 2 {flags}")
    line = loading_line(config, FilesSource(config), replicas=replicas, step=step)
    assert line == f"data: a sample takes 1,000 ms to encode and 1,000 ms to load here, so --num-workers 0 {said}"


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


LONG = " ".join(WORDS * 4)
TURNS = [
    {"from": "human", "value": "where is <image> ?"},
    {"from": "gpt", "value": "on the mat ."},
    {"from": "human", "value": "what is it ?"},
    {"from": "gpt", "value": "a cat ."},
]
LINES = {
    "asked": record("<image>\nwhat is this ?", image="images/0-0.jpg"),
    "turns": json.dumps({"image": "images/0-0.jpg", "conversations": TURNS}),
    "blind": record("what is a dog ?"),
    "long": json.dumps({"conversations": [*TURNS[2:3], {"from": "gpt", "value": LONG}]}),
    "broken": record("<image>\nwhat is this ?", image="images/broken.jpg"),
    "absent": record("<image>\nwhat is this ?", image="images/none.jpg"),
    "mute": json.dumps({"conversations": [TURNS[2], {"from": "gpt", "value": ""}]}),
}


@pytest.fixture(scope="module")
def prompt_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompt_files = write_all(tmp_path_factory.mktemp("files"), samples=3)
    (prompt_files / "images" / "0-0.jpg").write_bytes(next((prompt_files / "images").glob("*.jpg")).read_bytes())
    (prompt_files / "images" / "broken.jpg").write_bytes((prompt_files / "images" / "0-0.jpg").read_bytes()[:90])
    for name, line in LINES.items():
        (prompt_files / f"{name}.jsonl").write_text(line + "\n")
    (prompt_files / "story.txt").write_text(" ".join(WORDS) + "\n")
    return prompt_files


def chosen(prompt_files: Path, *held: str, flags: str = "") -> tuple[FilesSource, tuple[HeldOutPrompt, ...]]:
    paths = [str(prompt_files / (name if "." in name else f"{name}.jsonl")) for name in held]
    argv = [*SMALL, *sources_of(prompt_files), "--images-per-sample", "1", "--image-sizes", "--sample-interval", "1"]
    config = resolve(parse([*argv, "--seq-length", "64", "--validation", *paths, *flags.split()]))
    source = FilesSource(config)
    return source, choose_prompts(config, source, source.validation_samples(config))


def test_data_sets_take_turns_whatever_their_sizes() -> None:
    samples = [HeldOut(source, record) for source, record in ((0, 5), (0, 1), (2, 3), (0, 0), (2, 4))]
    found = [(each.source, each.record) for each in in_turn(samples)]
    assert found == [(0, 5), (2, 3), (0, 1), (2, 4), (0, 0)]


@pytest.mark.parametrize(
    ("name", "flags", "question", "reference", "pictures"),
    [
        ("asked", "", "what is this ?", "a cat .", 1),
        ("blind", "", "what is a dog ?", "a cat .", 0),
        ("turns", "", "where is [image] ?", "on the mat .", 1),
        (
            "turns",
            "--train-on last",
            "user: where is [image] ?\nassistant: on the mat .\nuser: what is it ?",
            "a cat .",
            1,
        ),
    ],
)
def test_a_prompt_is_what_training_sees_before_the_answer(prompt_files, name, flags, question, reference, pictures):
    source, (prompt,) = chosen(prompt_files, name, flags=flags)
    assert (prompt.question, prompt.reference, len(prompt.pictures)) == (question, reference, pictures)
    assert prompt.label == f"{name}.jsonl:1"
    (encoded,) = source.encode(HeldOut(0, 0)).samples
    length = len(prompt.sample)
    assert prompt.sample.tokens.tolist() == encoded.tokens[:length].tolist()
    assert not encoded.trained[:length].any()
    assert encoded.trained[length]
    assert len(prompt.sample.images) == pictures
    assert all(picture.ndim == 3 and max(picture.shape[:2]) <= 448 for picture in prompt.pictures)
    answer = encoded.tokens[length:].tolist()
    ends = next(place for place, token in enumerate(answer) if token in source.answer_ends)
    assert source.decode_answer(answer[:ends]).split() == reference.split()


def test_plain_text_is_continued(prompt_files: Path) -> None:
    for most, words in ((3, 3), (1000, 10)):
        source, (prompt,) = chosen(prompt_files, "story.txt", flags=f"--set evaluation.sample_max_new_tokens={most}")
        assert prompt.question.split() + prompt.reference.split() == WORDS
        assert len(prompt.reference.split()) == words
        assert source.decode_answer(prompt.sample.tokens.tolist()).split() == prompt.question.split()


def test_an_image_is_part_of_the_prompt(prompt_files: Path) -> None:
    text = " ".join([*WORDS[:12], "<image>", *WORDS[12:15]])
    (prompt_files / "pictured.jsonl").write_text(json.dumps({"text": text, "image": "images/0-0.jpg"}))
    source, (prompt,) = chosen(prompt_files, "pictured")
    assert (prompt.question.split(), prompt.reference.split()) == (WORDS[:12], WORDS[12:15])
    assert int((prompt.sample.tokens == source.image_token).sum()) == 4
    assert len(prompt.sample.images) == len(prompt.pictures) == 1


def test_a_reader_sees_some_of_many_images_and_the_model_all(prompt_files: Path) -> None:
    line = record("<image>" * 10 + "\nwhat is this ?", image=["images/0-0.jpg"] * 10)
    (prompt_files / "many.jsonl").write_text(line + "\n")
    _, (prompt,) = chosen(prompt_files, "many", flags="--seq-length 128")
    assert (len(prompt.sample.images), len(prompt.pictures)) == (10, 8)
    assert prompt.label == "many.jsonl:1 (10 images, of which 8 are shown)"


def test_what_cannot_be_asked_is_passed_over(prompt_files: Path) -> None:
    _, prompts = chosen(prompt_files, "long", "broken", "absent", "mute", "blind", "asked")
    assert [prompt.label for prompt in prompts] == ["blind.jsonl:1", "asked.jsonl:1"]
    _, prompts = chosen(prompt_files, "blind", "asked", flags="--set evaluation.sample_count=1")
    assert [prompt.label for prompt in prompts] == ["blind.jsonl:1"]


def test_a_run_without_a_prompt_is_refused(prompt_files: Path) -> None:
    line = json.dumps({"conversations": TURNS[2:] * 2})
    (prompt_files / "split.jsonl").write_text(f"{line}\n{line}\n")
    with pytest.raises(UserError, match=r"--sample-interval 1: none of the first 2 .* raise --seq-length.* out$"):
        chosen(prompt_files, "split", flags="--seq-length 20")
