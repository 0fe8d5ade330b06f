"""Evaluate on held-out questions: generate answers with the training pipeline and score them by exact match."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megavlm.data.collate import CollateSpec
from megavlm.data.source import Source
from megavlm.data.types import Sample
from megavlm.metrics.callback import Validation, Value
from megavlm.metrics.tags import tag_of
from megavlm.resilience.phases import EVALUATION, OTHER
from megavlm.train.build import Run
from megavlm.train.engine import Engine
from megavlm.train.generate import generate


class ExamQuestion(Protocol):
    """A held-out question: `sample` is the prompt, `answer` the expected text, `kind` the group of its score."""

    @property
    def kind(self) -> str: ...

    @property
    def answer(self) -> str: ...

    @property
    def sample(self) -> Sample: ...


@runtime_checkable
class Examiner(Source, Protocol):
    """A data source that also has held-out questions."""

    max_answer_tokens: int

    def questions(self, per_kind: int) -> Sequence[Any]: ...

    def with_shuffled_images(self, questions: Sequence[Any]) -> Sequence[Any]: ...

    def decode_answer(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Examination:
    """Questions and the model's answers, with the right images and with images of other questions."""

    questions: Sequence[Any]
    predictions: Sequence[str]
    shuffled_questions: Sequence[Any]
    shuffled_predictions: Sequence[str]


def answer_all(
    engine: Engine, source: Examiner, questions: Sequence[Any], *, spec: CollateSpec, micro_batch_size: int
) -> list[str]:
    """Return the model's answer to each question; equal on all ranks."""
    tokens = generate(
        engine,
        spec,
        [question.sample for question in questions],
        micro_batch_size=micro_batch_size,
        max_new_tokens=source.max_answer_tokens,
    )
    return [source.decode_answer(ids) for ids in tokens]


def exact_match(questions: Sequence[ExamQuestion], predictions: Sequence[str]) -> dict[str, float]:
    """Return the fraction of exactly right answers for each kind of question."""
    hits: dict[str, list[bool]] = defaultdict(list)
    for question, prediction in zip(questions, predictions, strict=True):
        hits[question.kind].append(prediction == question.answer)
    return {kind: sum(right) / len(right) for kind, right in hits.items()}


def examine(
    engine: Engine, source: Examiner, *, spec: CollateSpec, per_kind: int, micro_batch_size: int
) -> Examination:
    """Return the final evaluation: answers to all questions with their own images and with other questions' images."""
    questions = source.questions(per_kind)
    shuffled = source.with_shuffled_images(questions)
    return Examination(
        questions=questions,
        predictions=answer_all(engine, source, questions, spec=spec, micro_batch_size=micro_batch_size),
        shuffled_questions=shuffled,
        shuffled_predictions=answer_all(engine, source, shuffled, spec=spec, micro_batch_size=micro_batch_size),
    )


def report(examination: Examination, run_dir: Path) -> str:
    """Write RUN_DIR/evaluation.txt and RUN_DIR/examples.png; return the table of scores."""
    from megavlm.demo.results import draw_examples, exact_match_table

    table = exact_match_table(
        examination.questions,
        examination.predictions,
        examination.shuffled_questions,
        examination.shuffled_predictions,
    )
    (run_dir / "evaluation.txt").write_text(table + "\n")
    draw_examples(examination.questions, examination.predictions, run_dir / "examples.png")
    return table


def interval_evaluation(run: Run, iteration: int, say: Callable[[str], None]) -> dict[str, Value]:
    """Return the scores after `iteration` on a third of the final evaluation's questions, and its time; empty if there
    are none.
    """
    if not isinstance(run.source, Examiner):
        return {}
    questions = run.source.questions(max(1, run.config.evaluation.eval_samples // 3))
    run.engine.schedule.phases.enter(EVALUATION)
    began = time.perf_counter()
    predictions = answer_all(
        run.engine,
        run.source,
        questions,
        spec=CollateSpec.of(run.config, run.source),
        micro_batch_size=run.config.train.micro_batch_size,
    )
    run.engine.schedule.phases.enter(OTHER)
    scores = exact_match(questions, predictions)
    say("held-out exact match: " + ", ".join(f"{kind} {score:.0%}" for kind, score in scores.items()))
    named = {f"eval_{kind.replace(' ', '_')}": score for kind, score in scores.items()}
    run.callbacks.on_validation(Validation(iteration, {tag_of(name): score for name, score in named.items()}))
    return {**named, "eval_time_s": time.perf_counter() - began}


def final_evaluation(run: Run, say: Callable[[str], None]) -> None:
    """Answer all held-out questions, if the data have any; rank 0 writes the scores and some examples to RUN_DIR."""
    if not isinstance(run.source, Examiner):
        return
    run.engine.schedule.phases.enter(EVALUATION)
    say("answering held-out questions …")
    examination = examine(
        run.engine,
        run.source,
        spec=CollateSpec.of(run.config, run.source),
        per_kind=run.config.evaluation.eval_samples,
        micro_batch_size=run.config.train.micro_batch_size,
    )
    if run.progress is not None:
        say(report(examination, run.run_dir))
        say(f"examples: {run.run_dir / 'examples.png'}")
