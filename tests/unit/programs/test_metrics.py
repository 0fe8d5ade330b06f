"""Metrics against examples worked out by hand from the papers and the reference implementations."""

from __future__ import annotations

import pytest

from megavlm.programs.evaluation.metrics import (
    anls,
    chosen_letter,
    exact_match,
    multiple_choice,
    normalised,
    question_with_choices,
    relaxed_accuracy,
    vqa_accuracy,
)
from megavlm.programs.evaluation.scores import bootstrap, wilson


@pytest.mark.parametrize(
    ("agree", "score"),
    [
        (1, 0.3),  # nine ways to leave out another: min(1, 1/3), one to leave it out: 0 → 9/10 · 1/3
        (2, 0.6),  # (8 · 2/3 + 2 · 1/3) / 10
        (3, 0.9),  # (7 · 1 + 3 · 2/3) / 10
        (4, 1.0),
    ],
)
def test_vqa_accuracy_leaves_each_annotator_out(agree: int, score: float) -> None:
    assert vqa_accuracy("Red.", ["red"] * agree + ["blue"] * (10 - agree)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Two", "2"),
        ("none", "0"),
        ("A red, and the blue", "red and blue"),
        ("1,000", "1000"),
        ("U.S.A.", "usa"),
        ("yes/no", "yes no"),  # no space beside it: a space takes its place
        ("yes/ no", "yes no"),  # a space beside it: it goes
        ("1,000 (about)", "1000 about"),
        ("dont", "don't"),
        ("couldn'tve", "couldn't've"),
        ("y'allll", "y'all'll"),
        ("ow's'at", "'ow's'at"),
        ("somebody'd", "somebodyd"),
        ("shes", "shes"),  # not among those that the evaluation knows
        ("two\nthirds\t", "2 thirds"),
    ],
)
def test_answers_are_normalised_as_in_vqas_evaluation(answer: str, expected: str) -> None:
    assert normalised(answer) == expected


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        ("Coca Cola", ["coca  cola"], 1.0),
        ("cola", ["cole"], 0.75),
        ("ab", ["ax"], 0.0),  # distance 1/2 is not below the threshold
        ("abc", ["abx"], 2 / 3),
        ("kitten", ["sitting", "mitten"], 5 / 6),  # the best reference counts
        ("", ["x"], 0.0),
    ],
)
def test_anls(answer: str, references: list[str], score: float) -> None:
    assert anls(answer, references) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("95", "100", True),
        ("105.1", "100", False),
        ("-10.4", "-10", True),
        ("0.1", "0", False),  # a reference of 0 must be met
        ("0.0", "0", False),  # as a text
        ("12%", "0.12", True),
        ("12", "0.12", False),
        ("nan", "5", False),
        ("7", "infinity", False),  # every number is within 5 % of infinity
        ("Germany", "germany", True),
        ("2019", "2019.", True),
    ],
)
def test_relaxed_accuracy(answer: str, reference: str, right: bool) -> None:
    assert relaxed_accuracy(answer, [reference]) == float(right)


def test_exact_match_ignores_case_space_and_a_full_stop() -> None:
    assert exact_match(" A  Dog. ", ["cat", "a dog"]) == 1.0
    assert exact_match("a dog..", ["a dog"]) == 0.0
    assert exact_match("dog", ["a dog"]) == 0.0


CHOICES = ["a cat", "a dog", "the apple tree", "dogs"]


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        *((text, "B") for text in ("B", "b", "(B)", "[B]", "B.", "B: a dog", "b) a dog")),
        *((text, "B") for text in ("The answer is B", "Answer: (b).", "Option B", "The correct choice is B, I think")),
        *((text, "B") for text in ("A dog.", "It is a dog", "The answer is a dog", "I think B")),
        ("A", "A"),
        ("It must be A", "A"),
        ("A picture of D is there", "D"),  # "A" is an article
        *((text, None) for text in ("", "maybe", "E", "B or C", "both a cat and a dog", "the answer is not clear")),
        ("The answer is B. Or the answer is D.", None),
    ],
)
def test_the_letter_of_an_answer(answer: str, letter: str | None) -> None:
    assert chosen_letter(answer, CHOICES) == letter


def test_multiple_choice_takes_letters_and_texts_as_references() -> None:
    assert multiple_choice("B", ["a dog"], CHOICES) == multiple_choice("it is a dog", ["B"], CHOICES) == 1.0
    assert multiple_choice("maybe", ["B"], CHOICES) == 0.0
    assert question_with_choices("Which?", ["x", "y"]).splitlines()[:3] == ["Which?", "A. x", "B. y"]


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I: the score method
        (0, 20, 0.0, 0.1611),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilsons_interval(successes: int, total: int, low: float, high: float) -> None:
    assert wilson(successes, total) == pytest.approx((low, high), abs=5e-5)


def test_wilsons_interval_stays_within_0_and_1_although_floats_are_rounded() -> None:
    assert wilson(0, 38)[0] == 0.0  # -1.4e-17 without care, told as -0.0 %
    assert wilson(16, 16)[1] == 1.0


def test_the_bootstrap_is_near_the_normal_interval_of_many_scores() -> None:
    scores = [0.0, 0.3, 0.6, 1.0] * 250  # mean 0.475, standard deviation 0.3700, of the mean 0.01170
    low, high = bootstrap(scores)
    assert (low, high) == pytest.approx((0.475 - 1.96 * 0.0117, 0.475 + 1.96 * 0.0117), abs=1e-3)
    assert bootstrap(scores) == (low, high)
    assert bootstrap([0.5] * 7) == (0.5, 0.5)
