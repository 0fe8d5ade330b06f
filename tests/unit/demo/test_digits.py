"""The demo's data: what is held out stays out, answers are true, and questions ask about their own canvas."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config, DataConfig, ModelConfig, TrainConfig, VisionConfig
from megavlm.data.types import POSITIVE, QUERY, HeldOut, identity_of
from megavlm.demo.canvases import PHRASINGS, WORDS, Canvases, Glyph, Scene, load_scans, split_scans
from megavlm.demo.digits import DigitPairs, DigitsSource
from megavlm.errors import UserError
from megavlm.train.build_source import build_source

CONFIG = Config(
    model=ModelConfig(vision=VisionConfig(image_size=64, patch_size=16, in_channels=1)),
    train=TrainConfig(seq_length=48),
    data=DataConfig(kind="digits"),
)
SCANS = load_scans()
TRAINING, HELD_OUT = (set(part.tolist()) for part in split_scans(SCANS.labels))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run folder for all, so that its tokenizer is trained once."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def source(run_dir: Path) -> DigitsSource:
    built = build_source(CONFIG, run_dir=run_dir)
    assert isinstance(built, DigitsSource)
    return built


@pytest.fixture(scope="module")
def canvases() -> Canvases:
    return Canvases(seed=1, width=64)


def test_a_third_of_each_digit_is_held_out_and_no_image_is_on_both_sides() -> None:
    assert len(TRAINING) + len(HELD_OUT) == len(SCANS.labels) == 1797
    assert not TRAINING & HELD_OUT
    for digit in range(10):
        held_out = sum(SCANS.labels[scan] == digit for scan in HELD_OUT)
        assert held_out == (SCANS.labels == digit).sum() // 3
    pixels = [{SCANS.pixels[scan].tobytes() for scan in part} for part in (TRAINING, HELD_OUT)]
    assert not pixels[0] & pixels[1]


def test_held_out_scans_are_never_trained_on(canvases: Canvases) -> None:
    shown = {glyph.scan for index in range(2000) for glyph in canvases.training_scene(index).glyphs}
    assert shown <= TRAINING
    assert len(shown) > 0.8 * len(TRAINING)
    asked = {glyph.scan for index in range(300) for glyph in canvases.held_out_scene(index, kind="largest").glyphs}
    assert asked <= HELD_OUT


def test_an_upright_glyph_of_scan_size_is_the_scan(canvases: Canvases) -> None:
    scan = 17
    glyph = Glyph(scan=scan, column=2, angle=0.0, size=(0.5, 0.5), shift=(0.0, 0.125), contrast=1.0)
    canvas = canvases.draw(Scene(glyphs=(glyph,), kind="largest", phrasing=0))
    assert canvas.shape == (16, 64)
    expected = np.zeros((16, 64))
    # Cell (0, 2) begins at (0, 32); the scan of 8 pixels stands in its middle, 0.125 · 16 = 2 pixels to the right.
    expected[4:12, 38:46] = SCANS.pixels[scan] * (255 / 16)
    assert np.abs(canvas - expected).max() <= 1, "up to rounding"


def test_answers_are_true(canvases: Canvases) -> None:
    seen = set()
    for index in range(200):
        scene = canvases.training_scene(index)
        question, answer = canvases.dialogue(scene)
        digits = [SCANS.labels[glyph.scan] for glyph in scene.glyphs]
        if scene.kind == "which digits":
            assert [WORDS.index(word) for word in answer.split()] == digits
        elif scene.kind == "how many":
            assert WORDS.index(answer) == len(digits)
        else:
            assert WORDS.index(answer) == max(digits)
        assert question in PHRASINGS[scene.kind]
        seen.add((scene.kind, len(digits)))
    assert seen == {(kind, count) for kind in PHRASINGS for count in (1, 2, 3, 4)}


def test_a_sample_trains_the_answer_and_the_end_mark(source: DigitsSource) -> None:
    for index in range(20):
        sample = source.sample(index)
        prompt, answer = sample.tokens[~sample.trained], sample.tokens[sample.trained]
        assert (sample.tokens == source.image_token).sum() == 4
        assert any(source.decode_answer(prompt).endswith(text) for texts in PHRASINGS.values() for text in texts)
        words = source.decode_answer(answer).split()
        assert words
        assert set(words) <= set(WORDS)
        assert len(answer) == len(words) + 1 <= source.max_answer_tokens


def test_questions_are_the_same_for_every_seed_and_show_their_canvas(source: DigitsSource, run_dir: Path) -> None:
    other = build_source(replace(CONFIG, train=replace(CONFIG.train, seed=7)), run_dir=run_dir)
    assert isinstance(other, DigitsSource)
    questions, again = source.questions(10), other.questions(10)
    assert [question.kind for question in questions] == list(PHRASINGS) * 10
    for ours, theirs in zip(questions, again, strict=True):
        assert (ours.question, ours.reference) == (theirs.question, theirs.reference)
        assert np.array_equal(ours.pictures[0], theirs.pictures[0])
        assert np.array_equal(ours.sample.images[0].render(), ours.pictures[0][:, :, :1])
        assert not ours.sample.trained.any()
        assert source.decode_answer(ours.sample.tokens).endswith(ours.question), "the answer begins there"


def test_shuffling_gives_every_question_the_canvas_of_another(source: DigitsSource) -> None:
    questions = source.questions(20)
    shuffled = source.with_shuffled_images(questions)
    places = {question.pictures[0].tobytes(): place for place, question in enumerate(questions)}
    taken = [places[question.pictures[0].tobytes()] for question in shuffled]
    assert sorted(taken) == list(range(len(questions)))
    assert all(place != donor for place, donor in enumerate(taken))
    for before, after in zip(questions, shuffled, strict=True):
        assert (before.kind, before.question, before.reference) == (after.kind, after.question, after.reference)
        assert np.array_equal(before.sample.tokens, after.sample.tokens)
        assert np.array_equal(after.sample.images[0].render(), after.pictures[0][:, :, :1])


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (replace(CONFIG, train=replace(CONFIG.train, seq_length=12)), r"--seq-length 12 .* at least \d+"),
        (
            replace(CONFIG, model=ModelConfig(vision=VisionConfig(image_size=30))),
            "model.vision.image_size 30 .* at least 32",
        ),
        (
            replace(CONFIG, model=replace(CONFIG.model, language=replace(CONFIG.model.language, vocab_size=50))),
            "model.language.vocab_size 50",
        ),
    ],
)
def test_sizes_that_do_not_fit_name_the_option(changed: Config, match: str, run_dir: Path) -> None:
    with pytest.raises(UserError, match=match):
        build_source(changed, run_dir=run_dir)


def test_a_missing_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        load_scans()


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
