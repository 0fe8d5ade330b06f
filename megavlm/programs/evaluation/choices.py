"""Multiple choice: how choices are asked, and which of them an answer names."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

LETTERS = string.ascii_uppercase
_ASK = "Answer with the option's letter from the given choices directly."
# Punctuation or the end must follow, because "the answer is a dog" names no letter.
_STATED = re.compile(r"\b(?:answer|option|choice)(?:\s+is)?\s*[:=]?\s*\(?([a-z])(?=\s*(?:[^\w\s'’]|$))", re.IGNORECASE)


def question_with_choices(question: str, choices: Sequence[str]) -> str:
    """Return a question with its lettered choices, as LLaVA and lmms-eval ask MMBench's and MMMU's; without, as is."""
    if not choices:
        return question
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question, *lines, _ASK])


def chosen_letter(answer: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the choice that an answer names, or None where it names none or more than one.

    The first of these rules that finds a letter decides. They are those of MMMU's and MMBench's evaluations (Yue et al.
    2023, Liu et al. 2023), but none is drawn at random where an answer names no choice.

    1. The answer is a letter, or begins with one that brackets, a full stop or a colon set apart: "b", "(B)", "B. cat".
    2. It says which: "The answer is B", "Option: B".
    3. It is the text of a choice, or contains that of one choice alone.
    4. One capital letter stands by itself; "A" and "I" count only at the end, elsewhere they are words.
    """
    text, letters = answer.strip(), LETTERS[: len(choices)]
    for found in (_leading(text), _stated(text), _by_text(text, choices), _standing_alone(text, letters)):
        if found is not None and found in letters:
            return found
    return None


def _leading(text: str) -> str | None:
    match = re.match(r"[(\[]?([A-Za-z])(?:[)\].:,]|\s*$)(?![A-Za-z])", text)
    return match[1].upper() if match else None


def _stated(text: str) -> str | None:
    found = {letter.upper() for letter in _STATED.findall(text)}
    return found.pop() if len(found) == 1 else None


def _by_text(text: str, choices: Sequence[str]) -> str | None:
    said, plain = _plain(text), [_plain(choice) for choice in choices]
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


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(".,!?:; ")
