"""The metrics of a task: pure functions of a model's answer and the reference answers, each with its published source.

A metric returns a score between 0 and 1 for one question; a task's score is the mean over its questions.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

LETTERS = string.ascii_uppercase
_ASK = "Answer with the option's letter from the given choices directly."
# Punctuation or the end must follow, because "the answer is a dog" names no letter.
_STATED = re.compile(r"\b(?:answer|option|choice)(?:\s+is)?[\s:=>(*]*([a-z])(?=\s*(?:[^\w\s'’]|$))", re.IGNORECASE)


def question_with_choices(question: str, choices: Sequence[str]) -> str:
    """Return a question with lettered choices in the format of LLaVA and lmms-eval; unchanged without choices."""
    if not choices:
        return question
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question, *lines, _ASK])


def chosen_letter(answer: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the choice that an answer names, or None if it names no choice or several.

    The first of these rules that finds a letter decides. They follow the evaluations of MMMU and MMBench (Yue et al.
    2023, Liu et al. 2023), except that no choice is drawn at random for an answer that names none.

    1. The answer is a letter, or begins with one and a mark: "b", "(B)", "B. cat", "**B** is a cat".
    2. The answer states the letter: "The answer is **B**", "Option: B", "<answer>B</answer>".
    3. The answer is the text of a choice, or contains the text of exactly one choice.
    4. One capital letter stands by itself; "A" and "I" count only at the end, because elsewhere they are words.
    """
    text, letters = answer.strip(), LETTERS[: len(choices)]
    for found in (_leading(text), _stated(text), _by_text(text, choices), _standing_alone(text, letters)):
        if found is not None and found in letters:
            return found
    return None


def _leading(text: str) -> str | None:
    match = re.match(r"[(\[*]*([A-Za-z])(?:[)\].:,*]|\s*$)(?![A-Za-z])", text)
    return match[1].upper() if match else None


def _stated(text: str) -> str | None:
    found = {letter.upper() for letter in _STATED.findall(text)}
    return found.pop() if len(found) == 1 else None


def _by_text(text: str, choices: Sequence[str]) -> str | None:
    said, plain = _bare_choice(text), [_bare_choice(choice) for choice in choices]
    if said in plain:
        return LETTERS[plain.index(said)]
    within = [
        place for place, choice in enumerate(plain) if choice and re.search(rf"(?<!\w){re.escape(choice)}(?!\w)", said)
    ]
    return LETTERS[within[0]] if len(within) == 1 else None


def _standing_alone(text: str, letters: str) -> str | None:
    words = re.findall(r"(?<![\w'’])([A-Z])(?![\w'’])", text)
    ends = re.search(r"(?<![\w'’])([A-Z])\W*$", text)
    found = {word for word in words if word in letters and word not in "AI"} | ({ends[1]} if ends else set())
    return found.pop() if len(found) == 1 else None


def _bare_choice(text: str) -> str:
    return " ".join(text.lower().split()).strip(".,!?:; ")


_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_FULL_STOP = re.compile(r"\.(?!\d)")
_ARTICLES = frozenset(("a", "an", "the"))
_NUMBERS = {
    "none": "0",
    **{
        word: str(number) for number, word in enumerate("zero one two three four five six seven eight nine ten".split())
    },
}
# Contractions that the evaluation knows. It misses some ("we're", "let's", "she's", and all of "I").
_CONTRACTIONS = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd "
    "he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've "
    "needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've "
    "somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll "
    "that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've "
    "we've weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's "
    "who've why'll why're why's won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've "
    "you'll you're you've"
).split()


def _without_an_apostrophe(word: str) -> list[str]:
    """Return the spellings of a word with one of its apostrophes left out."""
    return [word[:place] + word[place + 1 :] for place, letter in enumerate(word) if letter == "'"]


_APOSTROPHES = {
    **dict(chain.from_iterable(((wrong, word) for wrong in _without_an_apostrophe(word)) for word in _CONTRACTIONS)),
    "somebody'd": "somebodyd",  # the evaluation has this pair the wrong way round
}


def normalised(answer: str) -> str:
    """Normalise an answer as VQA's evaluation does: punctuation, case, numbers, articles and contractions."""
    text = _without_punctuation(" ".join(answer.split()))
    words = [_NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(_APOSTROPHES.get(word, word) for word in words if word not in _ARTICLES)


def _without_punctuation(text: str) -> str:
    """Drop marks that touch a space (all marks, if a number has a comma); replace other marks by spaces.

    A full stop is dropped unless a digit follows.
    """
    has_number = _COMMA_IN_NUMBER.search(text) is not None
    found = text
    for mark in _PUNCTUATION:
        drop = has_number or f"{mark} " in text or f" {mark}" in text
        found = found.replace(mark, "" if drop else " ")
    return _FULL_STOP.sub("", found)


ANLS_THRESHOLD = 0.5
RELATIVE_TOLERANCE = 0.05
ANNOTATORS = 10  # reference answers of a question of VQA


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
    """Return the largest Levenshtein similarity to a reference, or 0 if it is not above 0.5.

    Average normalised Levenshtein similarity (Biten et al. 2019, "Scene Text Visual Question Answering"): 1 minus the
    edit distance over the length of the longer text, if that ratio is less than τ = 0.5, else 0. As in DocVQA, case and
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
    """Convert a text to a number, a percentage divided by 100; None for a text that is no finite number."""
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
    "anls": Metric(lambda answer, refs, _: anls(answer, refs), False, "Levenshtein similarity above 0.5"),
    "relaxed": Metric(lambda answer, refs, _: relaxed_accuracy(answer, refs), True, "number within 5 %, or equal text"),
    "multiple_choice": Metric(multiple_choice, True, "the letter of the right choice"),
}
