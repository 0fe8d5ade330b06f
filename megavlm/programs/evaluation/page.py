"""Write the questions that a model answered wrongly as one HTML page, with their images and first frames."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megavlm.data.decode import MAX_PIXELS
from megavlm.data.types import Visual
from megavlm.data.visuals import first_frame
from megavlm.html import document, facts, picture, section, table
from megavlm.inputs.bad_sample import BadSample
from megavlm.programs.evaluation.metrics import METRICS
from megavlm.programs.evaluation.scores import Scored, scores_of
from megavlm.programs.evaluation.task import Task

_SIDE = 320  # pixels of the longer side of an image on the page


def failures_page(
    title: str, about: Sequence[tuple[str, str]], tasks: Sequence[tuple[Task, Sequence[Scored]]], *, most: int
) -> str:
    """Return a page with the scores and, for each task, the `most` questions of the lowest scores below 1."""
    body = [f"<header><h1>{escape(title)}</h1>{facts(about)}</header>", section("Scores", _scores(tasks))]
    for task, found in tasks:
        wrong = sorted((each for each in found if each.score < 1), key=lambda each: each.score)
        shown = f", the {most:,} lowest" if len(wrong) > most else ""
        heading = f"{task.name}: {len(wrong):,} of {len(found):,} questions score below 1{shown}"
        body.append(section(heading, "".join(_failure(task, each) for each in wrong[:most])))
    return document(title, body)


def _scores(tasks: Sequence[tuple[Task, Sequence[Scored]]]) -> str:
    rows = (
        (
            escape(task.name),
            f"{score.metric}<small>{escape(METRICS[score.metric].about)}</small>",
            f"{score.mean:.1%}",
            f"{score.low:.1%} to {score.high:.1%}",
            f"{score.questions:,}",
            f"{score.not_asked:,}",
        )
        for task, found in tasks
        for score in scores_of(found)
    )
    return table(("task", "metric", "score", "95 % interval", "questions", "not asked"), rows, numbers=(2, 3, 4, 5))


def _failure(task: Task, failed: Scored) -> str:
    question = failed.question
    said = (
        f'<span class="warning">{escape(failed.answer.error)}</span>'
        if failed.answer.error
        else (f"<mark class=wrong>{escape(failed.answer.text) or '(nothing)'}</mark>")
    )
    images = "".join(_pictures(task, failed)) if question.pictures else ""
    distinct = " · ".join(map(escape, dict.fromkeys(question.references)))
    return (
        f"<article><h3>{escape(question.label)} <span>{question.metric} · score {failed.score:.2f}</span></h3>"
        f"{f'<div class=images>{images}</div>' if images else ''}"
        f'<div class="text">{escape(question.asked)}\n\nanswer: {said}\nreference: {distinct}</div></article>'
    )


def _pictures(task: Task, failed: Scored) -> list[str]:
    try:
        return [f'<div class="tiles">{_picture(image)}</div>' for image in task.pictures(failed.question)]
    except BadSample as error:
        return [f'<span class="warning">{escape(error.detail)}</span>']


def _picture(visual: Visual) -> str:
    """Return an image, or the first frame of a video, reduced, as an <img> that holds its bytes.

    Raises BadSample if it cannot be decoded.
    """
    return picture(first_frame(visual, max_pixels=MAX_PIXELS), side=_SIDE)
