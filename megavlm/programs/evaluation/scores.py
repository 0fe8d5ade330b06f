"""Score the answers to a task: the score of each question, and the mean with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import numpy as np

from megavlm.config.messages import several
from megavlm.data.types import Visual
from megavlm.data.visuals import first_frame
from megavlm.html import document, facts, picture, section, table
from megavlm.inputs.bad_sample import BadSample
from megavlm.programs.evaluation.answers import Answer
from megavlm.programs.evaluation.metrics import METRICS
from megavlm.programs.evaluation.task import Task, TaskQuestion

CONFIDENCE = 0.95
_Z = 1.959963984540054  # quantile: 95 % of a normal distribution lie within ± z
_RESAMPLES, _SEED = 10_000, 0


def wilson(successes: int, total: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share (1927), which stays within 0 and 1 and holds for few questions, too.

    Its bounds are the shares p at a distance of z·√(p(1−p)/n) from the observed share.
    """
    share, spread = successes / total, _Z**2 / total
    middle = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(scores: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean from 10,000 bootstrap resamples (Efron 1979), with a fixed seed.

    A resample of n questions is a multinomial draw of how often each distinct score occurs.
    """
    values, counts = np.unique(np.asarray(scores, dtype=np.float64), return_counts=True)
    total = int(counts.sum())
    drawn = np.random.default_rng(_SEED).multinomial(total, counts / total, size=_RESAMPLES)
    low, high = np.percentile(drawn @ values / total, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return float(low), float(high)


_SIDE = 320  # pixels of the longer side of an image on the page


def failures_page(
    title: str, about: Sequence[tuple[str, str]], tasks: Sequence[tuple[Task, Sequence[Scored]]], *, most: int
) -> str:
    """Return a page with the scores and, for each task, the `most` questions with the lowest scores below 1."""
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
    """Return `first_frame` as a downscaled <img> with embedded data.

    Raises BadSample if it cannot be decoded.
    """
    return picture(first_frame(visual), side=_SIDE)


@dataclass(frozen=True)
class Scored:
    """A question, the model's answer, and its score between 0 and 1."""

    question: TaskQuestion
    answer: Answer
    score: float


@dataclass(frozen=True)
class Score:
    """The mean score over the questions of a task with one metric, and its 95 % confidence interval."""

    metric: str
    questions: int
    mean: float
    low: float
    high: float
    interval: str  # "wilson" for metrics of 0 and 1, "bootstrap" for others
    not_asked: int  # questions whose images could not be read, or that are too long; they count as wrong

    def __str__(self) -> str:
        unasked = f", {self.not_asked:,} not asked" if self.not_asked else ""
        return (
            f"{self.metric} {self.mean:.1%} ({self.low:.1%} to {self.high:.1%} with {CONFIDENCE:.0%} confidence), "
            f"{several(self.questions, 'question')}{unasked}"
        )


def scored(task: Task, answers: Mapping[tuple[str, int], Answer]) -> list[Scored]:
    """Return the task's questions with their answers and scores; a question that could not be asked scores 0."""
    found = []
    for number, question in enumerate(task.questions):
        answer = answers[task.name, number]
        found.append(Scored(question, answer, 0.0 if answer.error else question.score(answer.text)))
    return found


def scores_of(found: Sequence[Scored]) -> list[Score]:
    """Return the mean score for each metric that the questions use, in the order of METRICS."""
    return [
        _score(metric, mine)
        for metric in METRICS
        if (mine := [each for each in found if each.question.metric == metric])
    ]


def _score(metric: str, found: Sequence[Scored]) -> Score:
    values = [each.score for each in found]
    binary = METRICS[metric].is_binary
    low, high = wilson(round(sum(values)), len(values)) if binary else bootstrap(values)
    return Score(
        metric=metric,
        questions=len(values),
        mean=sum(values) / len(values),
        low=low,
        high=high,
        interval="wilson" if binary else "bootstrap",
        not_asked=sum(each.answer.error is not None for each in found),
    )


def results_json(tasks: Sequence[tuple[Task, Sequence[Scored]]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of results.json: the settings, and by task the scores and each question with its answer."""
    return {
        "settings": dict(settings),
        "confidence": CONFIDENCE,
        "tasks": {
            task.name: {
                "scores": [asdict(score) for score in scores_of(found)],
                "answers": [
                    {
                        "question": each.question.label,
                        "references": list(each.question.references),
                        "answer": each.answer.text,
                        "error": each.answer.error,
                        "metric": each.question.metric,
                        "score": each.score,
                    }
                    for each in found
                ],
            }
            for task, found in tasks
        },
    }
