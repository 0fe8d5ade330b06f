"""Report the demo's results: a table of accuracies with and without the right image, and a picture of answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from megavlm.demo.digits import Question


def exact_match_table(
    questions: Sequence[Question],
    predictions: Sequence[str],
    shuffled_questions: Sequence[Question],
    shuffled_predictions: Sequence[str],
) -> str:
    """Return a table of the exact-match accuracy of each kind of question.

    "shuffled images" is the accuracy with each question's image replaced by that of another; "blind guess" is the score
    of always giving the kind's most frequent answer. With shuffled images, a model that reads its answers off the image
    falls to about the blind guess.
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

    Examples are taken evenly from the list of questions, whether the answer is right or wrong.
    """
    shown = [round(place) for place in np.linspace(0, len(questions) - 1, min(count, len(questions)))]
    cards = [_card(questions[number], predictions[number]) for number in shown]
    columns = min(_COLUMNS, len(cards))
    rows = -(-len(cards) // columns)
    width, height = cards[0].width + _GAP, max(card.height for card in cards) + _GAP
    sheet = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), _PAPER)
    for place, card in enumerate(cards):
        row, column = divmod(place, columns)
        sheet.paste(card, (_GAP + column * width, _GAP + row * height))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


_COLUMNS = 4
_CANVAS_WIDTH = 240
_MARGIN = 14
_GAP = 16
_LINE = 20

_PAPER, _CARD, _INK, _MUTED = "#e9ecf1", "#ffffff", "#1d2430", "#6b7484"
_RIGHT, _WRONG = "#16834a", "#c62f3b"


def _card(question: Question, prediction: str) -> Image.Image:
    """Return one example: the canvas, the question on at most two lines, the answer, the model's answer."""
    verdict = _RIGHT if prediction == question.answer else _WRONG
    canvas = _enlarged(question.canvas)
    width, height = canvas.width + 2 * _MARGIN, canvas.height + 4 * _MARGIN + 4 * _LINE
    card = Image.new("RGB", (width, height), _CARD)
    card.paste(canvas, (_MARGIN, _MARGIN))
    pen = ImageDraw.Draw(card)
    pen.rectangle((0, height - 6, width, height), fill=verdict)
    top = canvas.height + 2 * _MARGIN - 4
    for line in wrap(question.text, width=34)[:2]:
        pen.text((_MARGIN, top), line, font=_font(14), fill=_INK)
        top += _LINE
    top = height - _MARGIN - 2 * _LINE - 4
    for label, words, colour in (("answer", question.answer, _INK), ("model", prediction or "(nothing)", verdict)):
        pen.text((_MARGIN, top), label, font=_font(12), fill=_MUTED)
        pen.text((_MARGIN + 52, top - 2), _fitting(words, width=canvas.width - 52), font=_font(14), fill=colour)
        top += _LINE
    return card


def _enlarged(canvas: NDArray[np.uint8]) -> Image.Image:
    """Return the canvas as the model sees it, enlarged without interpolation."""
    height, width, channels = canvas.shape
    pixels = canvas if channels == 3 else np.repeat(canvas[:, :, :1], 3, axis=2)
    size = (_CANVAS_WIDTH, round(_CANVAS_WIDTH * height / width))
    return Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)


def _fitting(text: str, *, width: int) -> str:
    """Return the text, cut with an ellipsis if it is wider than `width` pixels."""
    if _font(14).getlength(text) <= width:
        return text
    while text and _font(14).getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _hits(questions: Sequence[Question], predictions: Sequence[str]) -> dict[str, list[bool]]:
    """Return, for each kind, whether each question was answered exactly."""
    hits: dict[str, list[bool]] = {}
    for question, prediction in zip(questions, predictions, strict=True):
        hits.setdefault(question.kind, []).append(prediction == question.answer)
    return hits


def _share(hits: Iterable[bool]) -> float:
    return float(np.mean(list(hits)))
