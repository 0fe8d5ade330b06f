"""Evaluate on held-out questions: generate answers with the training pipeline and score them by exact match."""

from __future__ import annotations

from collections.abc import Sequence

from megavlm.data.collate import CollateSpec
from megavlm.data.source import HeldOutPrompt
from megavlm.files import open_new, replace_file
from megavlm.metrics.callback import Value
from megavlm.resilience.phases import VALIDATION
from megavlm.train.generate import generate
from megavlm.train.run import Run


def _answers(run: Run, questions: Sequence[HeldOutPrompt]) -> list[str]:
    """Return the model's answer to each question; equal on all ranks."""
    source = run.source
    tokens = generate(
        run.engine,
        CollateSpec.of(run.config, source),
        [question.sample for question in questions],
        micro_batch_size=run.config.train.micro_batch_size,
        max_new_tokens=source.max_answer_tokens,
    )
    return [source.decode_answer(ids) for ids in tokens]


def accuracies(run: Run) -> dict[str, Value]:
    """Return the accuracy of each kind of question, on a third of the final evaluation's questions; {} if the data have
    none.
    """
    questions = run.source.questions(max(1, run.config.evaluation.eval_samples // 3))
    if not questions:
        return {}
    hits: dict[str, list[bool]] = {}
    for question, answer in zip(questions, _answers(run, questions), strict=True):
        hits.setdefault(question.kind, []).append(answer == question.reference)
    return {f"validation/{kind.replace(' ', '_')}/accuracy": sum(right) / len(right) for kind, right in hits.items()}


def final_evaluation(run: Run) -> None:
    """Answer all held-out questions, if the data have any; rank 0 writes the scores and some examples to RUN_DIR."""
    questions = run.source.questions(run.config.evaluation.eval_samples)
    if not questions:
        return
    run.engine.schedule.phases.enter(VALIDATION, "answers")
    run.say("answering held-out questions …")
    with run.engine.evaluation():
        answers = _answers(run, questions)
        shuffled = _answers(run, run.source.with_shuffled_images(questions))
    if run.progress is None:
        return
    from megavlm.demo.results import draw_examples, exact_match_table

    table, examples = exact_match_table(questions, answers, shuffled), run.run_dir / "examples.png"
    replace_file(run.run_dir / "evaluation.txt", table + "\n")
    open_new(examples).close()  # the library would follow a link
    draw_examples(questions, answers, examples)
    run.say(table)
    run.say(f"examples: {examples}")
