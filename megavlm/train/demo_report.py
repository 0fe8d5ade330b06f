"""What the demo shows at its end: a table that proves that the model looks, and a picture of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont


class Question(Protocol):
    """What of a held-out question the report reads."""

    @property
    def kind(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def answer(self) -> str: ...

    @property
    def canvas(self) -> NDArray[np.uint8]:
        """[height, width, channels]"""
        ...


def exact_match_table(
    questions: Sequence[Question],
    predictions: Sequence[str],
    shuffled_questions: Sequence[Question],
    shuffled_predictions: Sequence[str],
) -> str:
    """Exact-match accuracy per kind of question, as text.

    `shuffled` is the accuracy with each question's image replaced by another's; `blind` is what always giving the
    kind's most frequent answer would score. A model that reads the answer off the image falls to about `blind`.
    """
    hits = _hits(questions, predictions)
    shuffled_hits = _hits(shuffled_questions, shuffled_predictions)
    answers: dict[str, Counter[str]] = {}
    for question in questions:
        answers.setdefault(question.kind, Counter())[question.answer] += 1
    header = f"{'question':<14} {'n':>5} {'exact match':>12} {'shuffled images':>16} {'blind guess':>12}"
    rows = [
        f"{kind:<14} {len(right):>5} {_share(right):>12.1%} {_share(shuffled_hits[kind]):>16.1%} "
        f"{max(answers[kind].values()) / len(right):>12.1%}"
        for kind, right in hits.items()
    ]
    return "\n".join([header, "-" * len(header), *rows])


def draw_examples(questions: Sequence[Question], predictions: Sequence[str], path: Path, *, count: int = 12) -> None:
    """Write one PNG of up to `count` canvases with question, answer and prediction: green right, red wrong.

    Examples are spread evenly over the questions, as they come: right and wrong ones alike.
    """
    shown = [round(place) for place in np.linspace(0, len(questions) - 1, min(count, len(questions)))]
    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    sheet = Image.new(
        "RGB",
        (columns * _CARD_WIDTH + (columns + 1) * _GAP, rows * _CARD_HEIGHT + (rows + 1) * _GAP),
        _PAPER,
    )
    for place, number in enumerate(shown):
        row, column = divmod(place, columns)
        card = _card(questions[number], predictions[number])
        sheet.paste(card, (_GAP + column * (_CARD_WIDTH + _GAP), _GAP + row * (_CARD_HEIGHT + _GAP)))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


_COLUMNS = 4
_CANVAS_SIDE = 240
_MARGIN = 14
_GAP = 16
_LINE = 20
_CARD_WIDTH = _CANVAS_SIDE + 2 * _MARGIN
_CARD_HEIGHT = _CANVAS_SIDE + 4 * _MARGIN + 4 * _LINE

_PAPER, _CARD, _INK, _MUTED = "#e9ecf1", "#ffffff", "#1d2430", "#6b7484"
_RIGHT, _WRONG = "#16834a", "#c62f3b"


def _card(question: Question, prediction: str) -> Image.Image:
    """One example: the canvas, the question on two lines, the answer, the model's answer."""
    right = prediction == question.answer
    verdict = _RIGHT if right else _WRONG
    card = Image.new("RGB", (_CARD_WIDTH, _CARD_HEIGHT), _CARD)
    card.paste(_enlarged(question.canvas), (_MARGIN, _MARGIN))
    pen = ImageDraw.Draw(card)
    pen.rectangle((0, _CARD_HEIGHT - 6, _CARD_WIDTH, _CARD_HEIGHT), fill=verdict)
    top = _CANVAS_SIDE + 2 * _MARGIN - 4
    for line in wrap(question.text, width=34)[:2]:
        pen.text((_MARGIN, top), line, font=_font(14), fill=_INK)
        top += _LINE
    top = _CARD_HEIGHT - _MARGIN - 2 * _LINE - 4
    for label, words, colour in (("answer", question.answer, _INK), ("model", prediction or "(nothing)", verdict)):
        pen.text((_MARGIN, top), label, font=_font(12), fill=_MUTED)
        pen.text((_MARGIN + 52, top - 2), _fitting(words, width=_CANVAS_SIDE - 52), font=_font(14), fill=colour)
        top += _LINE
    return card


def _enlarged(canvas: NDArray[np.uint8]) -> Image.Image:
    """The canvas as the model sees it, in large square pixels."""
    pixels = canvas if canvas.shape[2] == 3 else np.repeat(canvas[:, :, :1], 3, axis=2)
    return Image.fromarray(pixels).resize((_CANVAS_SIDE, _CANVAS_SIDE), Image.Resampling.NEAREST)


def _fitting(text: str, *, width: int) -> str:
    """The text, cut with an ellipsis where it is too wide."""
    if _font(14).getlength(text) <= width:
        return text
    while text and _font(14).getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _hits(questions: Sequence[Question], predictions: Sequence[str]) -> dict[str, list[bool]]:
    """Per kind: which questions were answered exactly."""
    hits: dict[str, list[bool]] = {}
    for question, prediction in zip(questions, predictions, strict=True):
        hits.setdefault(question.kind, []).append(prediction == question.answer)
    return hits


def _share(hits: Iterable[bool]) -> float:
    return float(np.mean(list(hits)))
