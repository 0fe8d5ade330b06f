"""The metrics of a task: pure functions of a model's answer and the reference answers, each with its published source.

A metric returns a score between 0 and 1 for one question; a task's score is the mean over its questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megavlm.programs.evaluation.choices import chosen_letter
from megavlm.programs.evaluation.vqa_text import normalised

ANLS_THRESHOLD = 0.5
RELATIVE_TOLERANCE = 0.05
ANNOTATORS = 10  # of a question of VQA


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 for an answer equal to a reference but for case, runs of white space and a full stop at the end, else 0.

    GQA's accuracy (Hudson & Manning 2019) as LLaVA's evaluation compares its short answers.
    """
    return float(_bare(answer) in map(_bare, references))


def vqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """Return the mean, over the ten ways to leave one annotator out, of min(1, equal answers of the other nine / 3).

    Antol et al. 2015, "VQA: Visual Question Answering". Both sides are normalised, as on the evaluation server; the
    script on GitHub leaves both as they are where all ten references are equal.
    """
    given, said = normalised(answer), list(map(normalised, references))
    equal = said.count(given)
    return sum(min(1.0, (equal - (each == given)) / 3) for each in said) / len(said)


def anls(answer: str, references: Sequence[str]) -> float:
    """Return the largest Levenshtein similarity to a reference, or 0 where it is below 0.5.

    Average normalised Levenshtein similarity (Biten et al. 2019, "Scene Text Visual Question Answering"): 1 minus the
    edit distance over the length of the longer text, where that distance is less than τ = 0.5. As in DocVQA, case and
    runs of white space do not count.
    """
    return max(_similarity(_plain(answer), _plain(reference)) for reference in references)


def relaxed_accuracy(answer: str, references: Sequence[str]) -> float:
    """Return 1 for a number within 5 % of a reference's, or for a text equal to it but for case, else 0.

    ChartQA (Masry et al. 2022), after Methani et al. 2020; a percentage is a hundredth of its number, and a reference
    of 0 must be met as a text, as in the implementation of Pix2Struct.
    """
    return float(any(_relaxed(_plain(answer), _plain(reference)) for reference in references))


def multiple_choice(answer: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """Return 1 for an answer that chooses a reference, a letter or the text of a choice, else 0 (`chosen_letter`)."""
    letter = chosen_letter(answer, choices)
    return float(letter is not None and letter in {chosen_letter(reference, choices) for reference in references})


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _bare(text: str) -> str:
    return _plain(text).removesuffix(".").rstrip()


def _similarity(first: str, second: str) -> float:
    longest = max(len(first), len(second))
    distance = edit_distance(first, second) / longest if longest else 0.0
    return 1 - distance if distance < ANLS_THRESHOLD else 0.0


def edit_distance(first: str, second: str) -> int:
    """Return the fewest insertions, deletions and substitutions of characters (Levenshtein 1966)."""
    row = list(range(len(second) + 1))
    for place, letter in enumerate(first, 1):
        above, row = row, [place]
        for number, other in enumerate(second, 1):
            row.append(min(above[number] + 1, row[-1] + 1, above[number - 1] + (letter != other)))
    return row[-1]


def _relaxed(answer: str, reference: str) -> bool:
    given, wanted = _number(answer), _number(reference)
    if given is not None and wanted:
        return abs(given - wanted) <= RELATIVE_TOLERANCE * abs(wanted)
    return answer == reference


def _number(text: str) -> float | None:
    """Return the number that a text is; a percentage is divided by 100. None for a text that is no finite number."""
    try:
        value = float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Metric:
    """How the answers of a question are scored. `is_binary`: all scores are 0 or 1."""

    score: Callable[[str, Sequence[str], Sequence[str]], float]  # (answer, references, choices)
    is_binary: bool
    about: str  # for the page of results


METRICS: Mapping[str, Metric] = {
    "exact_match": Metric(lambda answer, refs, _: exact_match(answer, refs), True, "equal to a reference"),
    "vqa": Metric(lambda answer, refs, _: vqa_accuracy(answer, refs), False, "agrees with three of ten annotators"),
    "anls": Metric(lambda answer, refs, _: anls(answer, refs), False, "Levenshtein similarity of at least 0.5"),
    "relaxed": Metric(lambda answer, refs, _: relaxed_accuracy(answer, refs), True, "number within 5 %, or equal text"),
    "multiple_choice": Metric(multiple_choice, True, "the letter of the right choice"),
}
