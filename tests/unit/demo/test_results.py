"""The demo's table."""

from __future__ import annotations

import numpy as np

from megavlm.data.source import HeldOutPrompt
from megavlm.data.types import Sample
from megavlm.demo.results import exact_match_table

NO_PROMPT = Sample(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_))


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
