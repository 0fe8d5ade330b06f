"""Show how a model's answers to the same prompts change while it trains, as HTML without a script or another file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from html import escape
from itertools import groupby
from typing import Any, NamedTuple

from megavlm.html import document, facts, picture

_SIDE = 320  # pixels of the longer side of a picture
_OPEN = 6  # newest different answers that are shown without a click
_HEADLINE = 160  # characters of a prompt that are a headline; a longer one is text
_MOST_WORDS = 400  # of an answer whose words are compared
# A letter of a script without spaces between words is a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


class Question(NamedTuple):
    """A held-out prompt and its right answer. Answers are shown together if their prompt and reference are equal."""

    label: str
    prompt: str
    reference: str


class Said(NamedTuple):
    """An answer that stayed the same from the iteration `first` to `last`."""

    first: int
    last: int
    text: str


def samples_page(
    name: str,
    pictures: Mapping[Question, Sequence[Any]],
    moments: Sequence[tuple[int, Mapping[Question, str]]],
    *,
    answered: int,
    train_iters: int,
) -> str:
    """Return the page of a run. All text is escaped: what a model says is data.

    Args:
        pictures: images [height, width, 3] of the questions, in the order in which they are shown.
        moments: answers by question after some iterations, from the oldest to the newest, of `answered` in all.
    """
    newest, latest = moments[-1]
    right = sum(_same(latest.get(question, ""), question.reference) for question in pictures)
    shown = f"{len(moments):,}" + (f" of {answered:,}" if answered > len(moments) else "")
    about = (
        ("iteration", f"{newest:,} of {train_iters:,}" if train_iters else f"{newest:,}"),
        ("prompts", f"{len(pictures):,}"),
        ("equal to the reference", f"{right:,} of {len(pictures):,}"),
        ("times shown", shown),
    )
    title = f"Samples of “{name}”"
    head = (
        f'<header><h1>{escape(title)}</h1>{facts(about)}<p class="quiet">Held-out prompts, the same at each time. The '
        "newest answer comes first; the number beside an answer is the iteration after which the model gave it (0: "
        "before training). <mark>Marked</mark> words are in the reference, too, in the same order; ✓ is an answer "
        "equal to it.</p></header>"
    )
    return document(title, [head, *(_card(question, pictures[question], moments) for question in pictures)])


def changes(answers: Sequence[tuple[int, str]]) -> list[Said]:
    """Return each answer once for the iterations in which it stayed the same, the newest first."""
    found = []
    for text, times in groupby(answers, key=lambda each: each[1]):
        iterations = [iteration for iteration, _ in times]
        found.append(Said(iterations[0], iterations[-1], text))
    return found[::-1]


def _card(question: Question, images: Sequence[Any], moments: Sequence[tuple[int, Mapping[Question, str]]]) -> str:
    told = changes([(iteration, answers[question]) for iteration, answers in moments if question in answers])
    rows = [_row(said, question.reference) for said in told]
    older = rows[_OPEN:]
    more = (
        f"<details><summary>{len(older)} earlier {'answer' if len(older) == 1 else 'answers'}</summary>"
        f'<ol class="said">{"".join(older)}</ol></details>'
        if older
        else ""
    )
    reference = f'<li class="right"><b>reference</b><div>{escape(question.reference)}</div></li>'
    seen = f'<div class="images">{"".join(picture(image, side=_SIDE) for image in images)}</div>' if len(images) else ""
    look = ' class="long"' if len(question.prompt) > _HEADLINE else ""
    asked = f'<h2{look}>{escape(question.prompt) or "(no words)"}</h2><p class="quiet">{escape(question.label)}</p>'
    newest = f'<ol class="said">{reference}{"".join(rows[:_OPEN])}</ol>'
    return f'<section class="asked{"" if seen else " blind"}">{seen}<div>{asked}{newest}{more}</div></section>'


def _row(said: Said, reference: str) -> str:
    times = f"{said.first:,}" + (f"–<wbr>{said.last:,}" if said.last > said.first else "")
    sign = ' <span title="equal to the reference">✓</span>' if _same(said.text, reference) else ""
    text = compared(said.text, reference) or '<span class="quiet">(nothing)</span>'
    return f"<li><b>{times}{sign}</b><div>{text}</div></li>"


def _same(answer: str, reference: str) -> bool:
    return answer.strip() == reference.strip()


@lru_cache(maxsize=4096)  # a page is written again at each time, with the same answers
def compared(answer: str, reference: str) -> str:
    """Return an answer as HTML; words that the reference has, too, in the same order, are marked."""
    parts, at = [], 0
    for start, end in _common(answer, reference):
        parts += [escape(answer[at:start]), f"<mark>{escape(answer[start:end])}</mark>"]
        at = end
    return "".join(parts) + escape(answer[at:])


def _common(answer: str, reference: str) -> Iterator[tuple[int, int]]:
    """Yield the ranges [start, end) of words of an answer that the reference has too, in the same order."""
    places = [match.span() for match in _WORD.finditer(answer)]
    ours = [answer[start:end].casefold() for start, end in places]
    theirs = [word.casefold() for word in _WORD.findall(reference)]
    if max(len(ours), len(theirs)) > _MOST_WORDS:
        return
    for first, _, length in SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks():
        if length:
            yield places[first][0], places[first + length - 1][1]
