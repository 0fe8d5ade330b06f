"""Answers of a run on one page: nothing of them is HTML, and a run that resumed shows what one without a stop shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megavlm.command_line.parsing import parse
from megavlm.metrics.callback import Generation, Samples, Start, Stop
from megavlm.metrics.samples import MOST_MOMENTS, Question, SamplesSink, changes, samples_page
from tests.support.html import told

PICTURE = np.full((30, 500, 3), 120, dtype=np.uint8)
WALL = Question("walls.jsonl:3", "What is it?", "a grey wall")


def samples(iteration: int, answer: str | None = None, question: Question = WALL) -> Samples:
    said = f"answer {iteration}" if answer is None else answer
    return Samples(iteration, [Generation(question.prompt, said, question.reference, [PICTURE], question.label)])


def write(folder: Path, *iterations: int, resume: int = 0) -> str:
    sink = SamplesSink(folder / "samples", resume_iteration=resume)
    sink.on_start(Start(folder, parse(["--train-iters", "90"]), resume, 1, "CPU"))
    for iteration in iterations:
        sink.on_samples(samples(iteration))
    sink.on_stop(Stop(iterations[-1], "finished"))
    return (folder / "samples" / "index.html").read_text()


def test_what_a_model_says_is_text(tmp_path: Path) -> None:
    evil = '<script>alert(1)</script> & "it" </div>'
    question = Question(evil, f"asked {evil}", f"right {evil}")
    page = samples_page(
        evil, {question: [PICTURE]}, [(0, {question: evil}), (3, {question: ""})], answered=2, train_iters=9
    )
    words = told(page)
    assert words.count(evil) >= 4
    assert f"Samples of “{evil}”" in words
    assert "(nothing)" in words
    body = page.partition("</style>")[2]
    assert "<script" not in body
    assert not re.findall(r"(?:src|href)=\"(?!data:image/)", body)
    assert 'width="320" height="19"' in body


def test_an_answer_comes_once_for_the_iterations_in_which_it_stayed() -> None:
    found = changes([(0, "a"), (10, "b"), (20, "b"), (30, "a"), (40, "c")])
    assert [tuple(each) for each in found] == [(40, 40, "c"), (30, 30, "a"), (10, 20, "b"), (0, 0, "a")]


@pytest.mark.parametrize("number", [1, 2, MOST_MOMENTS - 1, MOST_MOMENTS, 500])
def test_a_page_does_not_grow_for_ever(tmp_path: Path, number: int) -> None:
    page = write(tmp_path / "run", *range(0, 10 * number, 10))
    shown = set(re.findall(r"answer (\d+)<", page))
    assert min(number, MOST_MOMENTS // 2) <= len(shown) <= MOST_MOMENTS
    assert {"0", str(10 * (number - 1))} <= shown


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    whole = write(tmp_path / "a" / "run", *range(0, 60, 10))
    write(tmp_path / "b" / "run", *range(0, 40, 10))
    assert write(tmp_path / "b" / "run", *range(20, 60, 10), resume=10) == whole
    lines = [json.loads(line) for line in (tmp_path / "b/run/samples/answers.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(0, 60, 10))
    assert lines[2]["answers"] == [
        {**dict(zip(("label", "prompt", "reference"), WALL, strict=True)), "answer": "answer 20"}
    ]
    assert "50 of 90" in told(whole)
    assert "answer 20" not in write(tmp_path / "b" / "run", 0)


def test_damaged_lines_cost_no_other(tmp_path: Path) -> None:
    write(tmp_path, 0, 10)
    path = tmp_path / "samples" / "answers.jsonl"
    path.write_text(path.read_text() + '{"iteration": 11, "answers": [3]}\n{"iteration": 12, "answ')
    SamplesSink(tmp_path / "samples", resume_iteration=20).on_samples(samples(20))
    words = told((tmp_path / "samples" / "index.html").read_text())
    assert all(f"answer {iteration}" in words for iteration in (0, 10, 20))
