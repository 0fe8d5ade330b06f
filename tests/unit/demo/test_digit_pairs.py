"""Canvases and their words as pairs: each asks for the other, and the control can only be guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megavlm.command_line.parsing import parse
from megavlm.data.members import POSITIVE, QUERY, identity_of
from megavlm.data.types import HeldOut
from megavlm.demo.canvases import Canvases
from megavlm.demo.digit_pairs import DigitPairs
from megavlm.errors import UserError

DEMO = ["--recipe", "demo-embed"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> DigitPairs:
    return DigitPairs.build(parse(DEMO), run_dir=tmp_path_factory.mktemp("pairs"), rank=0, barrier=lambda: None)


def held_out_words(record: int) -> str:
    canvases = Canvases(seed=0, width=64)
    return canvases.digits_of(canvases.held_out_scene(record, kind="which digits"))


def test_records_ask_for_canvases_and_for_words_in_turn(pairs: DigitPairs) -> None:
    for index in range(4):
        query, document = pairs.sample(index).texts()
        assert (query.members[0].role, document.members[0].role) == (QUERY, POSITIVE)
        asked, found = (text.members[0].images for text in (query, document))
        assert (asked, found) == ((0, 1) if index % 2 == 0 else (1, 0))


def test_held_out_records_are_what_their_data_set_says(pairs: DigitPairs) -> None:
    for record in range(5):
        canvas, words, shuffled = (pairs.validation_sample(HeldOut(source, record)) for source in range(3))
        assert canvas.members[1].identity == words.members[1].identity == identity_of(held_out_words(record))
        text = canvas.texts()[0].tokens
        assert words.texts()[1].tokens.tolist() == text.tolist() == shuffled.texts()[0].tokens.tolist()
        right, wrong = (each.images[0].patches() for each in (canvas, shuffled))
        assert not right.equal(wrong)
        following = pairs.validation_sample(HeldOut(0, record + 1)).images[0].patches()
        assert wrong.equal(following)


def test_a_sequence_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--seq-length 16 is too short"):
        DigitPairs.build(parse([*DEMO, "--seq-length", "16"]), run_dir=tmp_path, rank=0, barrier=lambda: None)
