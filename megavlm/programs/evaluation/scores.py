"""Scores of a task: each question's, and their mean with a confidence interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megavlm.config.messages import several
from megavlm.programs.evaluation.answers import Answer
from megavlm.programs.evaluation.intervals import CONFIDENCE, bootstrap, wilson
from megavlm.programs.evaluation.metrics import METRICS
from megavlm.programs.evaluation.task import Question, Task


@dataclass(frozen=True)
class Scored:
    """A question, what the model said, and the score of that between 0 and 1."""

    question: Question
    answer: Answer
    score: float


@dataclass(frozen=True)
class Score:
    """The mean score of a task's questions of one metric, with its 95 % confidence interval."""

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
    """Return the score of each metric among questions, in the order of METRICS."""
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
    """Return what results.json holds: the settings, the scores by task, and each question with its answer."""
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
