"""Report the demo's results: a table of accuracies with and without the right image, and a picture of answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from megavlm.data.source import HeldOutPrompt


def exact_match_table(questions: Sequence[HeldOutPrompt], answers: Sequence[str], shuffled: Sequence[str]) -> str:
    """Return a table of the exact-match accuracy of each kind of question, given the answers with the questions' own
    images and with those of other questions (`shuffled`).

    "blind guess" is the score of always giving the kind's most frequent answer. With shuffled images, a model that
    reads its answers off the image falls to about the blind guess.
    """
    header = f"{'question':<14} {'n':>5} {'exact match':>12} {'shuffled images':>16} {'blind guess':>12}"
    rows = [header, "-" * len(header)]
    for kind in dict.fromkeys(question.kind for question in questions):
        places = [place for place, question in enumerate(questions) if question.kind == kind]
        right = [questions[place].reference for place in places]
        scores = [
            sum(given[place] == reference for place, reference in zip(places, right, strict=True)) / len(places)
            for given in (answers, shuffled)
        ]
        blind = max(Counter(right).values()) / len(places)
        rows.append(f"{kind:<14} {len(places):>5} {scores[0]:>12.1%} {scores[1]:>16.1%} {blind:>12.1%}")
    return "\n".join(rows)


def draw_examples(questions: Sequence[HeldOutPrompt], predictions: Sequence[str], path: Path) -> None:
    """Write one PNG of up to twelve canvases with question, answer and prediction: green right, red wrong.

    Examples are taken evenly from the list of questions, whether the answer is right or wrong.
    """
    shown = [round(place) for place in np.linspace(0, len(questions) - 1, min(_SHOWN, len(questions)))]
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


_SHOWN = 12
_COLUMNS = 4
_CANVAS_WIDTH = 240
_MARGIN = 14
_GAP = 16
_LINE = 20

_PAPER, _CARD, _INK, _MUTED = "#e9ecf1", "#ffffff", "#1d2430", "#6b7484"
_RIGHT, _WRONG = "#16834a", "#c62f3b"


def _card(question: HeldOutPrompt, prediction: str) -> Image.Image:
    """Return one example: the canvas, the question on at most two lines, the answer, the model's answer."""
    verdict = _RIGHT if prediction == question.reference else _WRONG
    canvas = _enlarged(question.pictures[0])
    width, height = canvas.width + 2 * _MARGIN, canvas.height + 4 * _MARGIN + 4 * _LINE
    card = Image.new("RGB", (width, height), _CARD)
    card.paste(canvas, (_MARGIN, _MARGIN))
    pen = ImageDraw.Draw(card)
    pen.rectangle((0, height - 6, width, height), fill=verdict)
    top = canvas.height + 2 * _MARGIN - 4
    for line in wrap(question.question, width=34)[:2]:
        pen.text((_MARGIN, top), line, font=_font(14), fill=_INK)
        top += _LINE
    top = height - _MARGIN - 2 * _LINE - 4
    for label, words, colour in (("answer", question.reference, _INK), ("model", prediction or "(nothing)", verdict)):
        pen.text((_MARGIN, top), label, font=_font(12), fill=_MUTED)
        pen.text((_MARGIN + 52, top - 2), words, font=_font(14), fill=colour)
        top += _LINE
    return card


def _enlarged(canvas: NDArray[np.uint8]) -> Image.Image:
    """Return the canvas as the model sees it, enlarged without interpolation."""
    height, width, _ = canvas.shape
    size = (_CANVAS_WIDTH, round(_CANVAS_WIDTH * height / width))
    return Image.fromarray(canvas).resize(size, Image.Resampling.NEAREST)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
