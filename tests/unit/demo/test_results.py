"""The demo's table and picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from megavlm.data.source import HeldOutPrompt
from megavlm.data.types import Sample
from megavlm.demo.results import draw_examples, exact_match_table

NO_PROMPT = Sample(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_))
GREEN, RED = (22, 131, 74), (198, 47, 59)


def asked(kind: str, answer: str) -> HeldOutPrompt:
    canvas = np.full((40, 40, 3), 128, dtype=np.uint8)
    text = "Which digits are there, from left to right?"
    return HeldOutPrompt(NO_PROMPT, kind, text, answer, (canvas,), kind=kind)


def test_the_table_counts_per_kind() -> None:
    questions = [asked("how many", answer) for answer in ("one", "two", "two", "three")] + [asked("largest", "nine")]
    table = exact_match_table(questions, ["one", "two", "two", "four", "nine"], ["two", "two", "one", "one", "eight"])
    how_many, largest = table.splitlines()[2:]
    assert how_many.split() == ["how", "many", "4", "75.0%", "25.0%", "50.0%"]
    assert largest.split() == ["largest", "1", "100.0%", "0.0%", "100.0%"]


def test_examples_are_green_where_right_and_red_where_wrong(tmp_path: Path) -> None:
    questions = [asked("which digits", "one") for _ in range(5)]
    predictions = ["one", *["three seven seven seven seven seven"] * 4]
    path = tmp_path / "run" / "examples.png"
    draw_examples(questions, predictions, path)
    with Image.open(path) as picture:
        colours = {colour: number for number, colour in picture.convert("RGB").getcolors(maxcolors=1 << 16)}
    assert 3 * colours[GREEN] < colours[RED]
    draw_examples(questions[:1], predictions[:1], path)
    with Image.open(path) as one:
        assert picture.height > 1.5 * one.height, "five are in two rows"
