"""Evaluate on held-out questions: generate answers with the training pipeline and score them by exact match."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megavlm.data.collate import CollateSpec
from megavlm.data.source import Source
from megavlm.data.types import Sample
from megavlm.demo.digits import slug
from megavlm.files import open_new, replace_file
from megavlm.metrics.callback import Value
from megavlm.resilience.phases import VALIDATION
from megavlm.train.engine import Engine
from megavlm.train.generate import generate
from megavlm.train.run import Run


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
    replace_file(run_dir / "evaluation.txt", table + "\n")
    open_new(run_dir / "examples.png").close()  # the library would follow a link
    draw_examples(examination.questions, examination.predictions, run_dir / "examples.png")
    return table


def accuracies(run: Run, source: Examiner) -> dict[str, Value]:
    """Return the accuracy of each kind of question, on a third of the final evaluation's questions."""
    questions = source.questions(max(1, run.config.evaluation.eval_samples // 3))
    predictions = answer_all(
        run.engine,
        source,
        questions,
        spec=CollateSpec.of(run.config, source),
        micro_batch_size=run.config.train.micro_batch_size,
    )
    return {f"validation/{slug(kind)}/accuracy": score for kind, score in exact_match(questions, predictions).items()}


def final_evaluation(run: Run) -> None:
    """Answer all held-out questions, if the data have any; rank 0 writes the scores and some examples to RUN_DIR."""
    if not isinstance(run.source, Examiner):
        return
    run.engine.schedule.phases.enter(VALIDATION, "answers")
    run.say("answering held-out questions …")
    with run.engine.evaluation():
        examination = examine(
            run.engine,
            run.source,
            spec=CollateSpec.of(run.config, run.source),
            per_kind=run.config.evaluation.eval_samples,
            micro_batch_size=run.config.train.micro_batch_size,
        )
    if run.progress is not None:
        run.say(report(examination, run.run_dir))
        run.say(f"examples: {run.run_dir / 'examples.png'}")
