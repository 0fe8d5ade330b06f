"""Prompts out of validation samples: which ones are chosen, and where they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megavlm.command_line.parsing import parse
from megavlm.data.file_source import FilesSource
from megavlm.data.prompts import choose_prompts
from megavlm.data.sample_order import in_turn
from megavlm.data.source import HeldOutPrompt
from megavlm.data.types import HeldOut
from megavlm.errors import UserError
from megavlm.rules.defaults import resolve
from tests.support.data_files import WORDS, record, sources_of, write_all
from tests.support.training import SMALL

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_all(tmp_path_factory.mktemp("files"), samples=3)
    (folder / "images" / "0-0.jpg").write_bytes(next((folder / "images").glob("*.jpg")).read_bytes())
    (folder / "images" / "broken.jpg").write_bytes((folder / "images" / "0-0.jpg").read_bytes()[:90])
    for name, line in LINES.items():
        (folder / f"{name}.jsonl").write_text(line + "\n")
    (folder / "story.txt").write_text(" ".join(WORDS) + "\n")
    return folder


def chosen(folder: Path, *held: str, flags: str = "") -> tuple[FilesSource, tuple[HeldOutPrompt, ...]]:
    paths = [str(folder / (name if "." in name else f"{name}.jsonl")) for name in held]
    argv = [*SMALL, *sources_of(folder), "--images-per-sample", "1", "--image-sizes", "--sample-interval", "1"]
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
def test_a_prompt_is_what_training_sees_before_the_answer(folder, name, flags, question, reference, pictures):
    source, (prompt,) = chosen(folder, name, flags=flags)
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


def test_plain_text_is_continued(folder: Path) -> None:
    for most, words in ((3, 3), (1000, 10)):
        source, (prompt,) = chosen(folder, "story.txt", flags=f"--set evaluation.sample_max_new_tokens={most}")
        assert prompt.question.split() + prompt.reference.split() == WORDS
        assert len(prompt.reference.split()) == words
        assert source.decode_answer(prompt.sample.tokens.tolist()).split() == prompt.question.split()


def test_an_image_is_part_of_the_prompt(folder: Path) -> None:
    text = " ".join([*WORDS[:12], "<image>", *WORDS[12:15]])
    (folder / "pictured.jsonl").write_text(json.dumps({"text": text, "image": "images/0-0.jpg"}))
    source, (prompt,) = chosen(folder, "pictured")
    assert (prompt.question.split(), prompt.reference.split()) == (WORDS[:12], WORDS[12:15])
    assert int((prompt.sample.tokens == source.image_token).sum()) == 4
    assert len(prompt.sample.images) == len(prompt.pictures) == 1


def test_a_reader_sees_some_of_many_images_and_the_model_all(folder: Path) -> None:
    line = record("<image>" * 10 + "\nwhat is this ?", image=["images/0-0.jpg"] * 10)
    (folder / "many.jsonl").write_text(line + "\n")
    _, (prompt,) = chosen(folder, "many", flags="--seq-length 128")
    assert (len(prompt.sample.images), len(prompt.pictures)) == (10, 8)
    assert prompt.label == "many.jsonl:1 (10 images, of which 8 are shown)"


def test_what_cannot_be_asked_is_passed_over(folder: Path) -> None:
    _, prompts = chosen(folder, "long", "broken", "absent", "mute", "blind", "asked")
    assert [prompt.label for prompt in prompts] == ["blind.jsonl:1", "asked.jsonl:1"]
    _, prompts = chosen(folder, "blind", "asked", flags="--set evaluation.sample_count=1")
    assert [prompt.label for prompt in prompts] == ["blind.jsonl:1"]


def test_a_run_without_a_prompt_is_refused(folder: Path) -> None:
    line = json.dumps({"conversations": TURNS[2:] * 2})
    (folder / "split.jsonl").write_text(f"{line}\n{line}\n")
    with pytest.raises(UserError, match=r"--sample-interval 1: none of the first 2 .* raise --seq-length.* out$"):
        chosen(folder, "split", flags="--seq-length 20")
