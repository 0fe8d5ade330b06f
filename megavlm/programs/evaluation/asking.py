"""Ask a model the questions of tasks, in batches, and keep its answers as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from megavlm.data.skips import REMEDIES, SkipSummary
from megavlm.data.survey import rounded
from megavlm.data.types import Sample, Skipped
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.programs.charts import duration
from megavlm.programs.evaluation.answers import Answer, AnswerFolder
from megavlm.programs.evaluation.task import Task
from megavlm.programs.inference.assistant import Assistant, Sampling

Work = Sequence[tuple[Task, int]]  # questions by task and number
_SECONDS = 10  # between two lines of progress
_MOST_UNASKED = 0.05  # of a task's questions: a score of the others says nothing about the task
_REMEDIES = {**REMEDIES, Reason.TOO_LONG: "shorten the questions"}


def remaining(tasks: Sequence[Task], folder: AnswerFolder, *, rank: int = 0, world: int = 1) -> list[tuple[Task, int]]:
    """Return the questions without an answer; of several processes, those of one.

    A question belongs to the same process whatever has been answered, so that processes that start at different
    moments need not agree.
    """
    done = folder.read().keys()
    everything = [(task, number) for task in tasks for number in range(len(task.questions))]
    return [(task, number) for task, number in everything[rank::world] if (task.name, number) not in done]


def unreadable(tasks: Sequence[Task]) -> Iterator[Answer]:
    """Yield the answers of questions whose images or videos are not where the task says: the reason, and no text."""
    for task in tasks:
        for number, question in enumerate(task.questions):
            try:
                task.pictures(question)
            except BadSample as error:
                yield _not_asked(task, number, error)


def refuse_unasked(tasks: Sequence[Task], answers: Iterable[Answer]) -> None:
    """Raise UserError, with the commonest reason, if more than 5 % of the questions of a task could not be asked."""
    failed = [answer for answer in answers if answer.error is not None]
    for task in tasks:
        mine = [answer for answer in failed if answer.task == task.name]
        if len(mine) > _MOST_UNASKED * len(task.questions):
            told = SkipSummary().add(_skipped(task, answer) for answer in mine).message(_REMEDIES)
            raise UserError(
                f"--task {task.name}: {len(mine):,} of {len(task.questions):,} questions could not be asked: {told}"
            )


def _not_asked(task: Task, number: int, error: BadSample) -> Answer:
    return Answer(task.name, number, "", f"{error.reason}: {error.detail}")


def _skipped(task: Task, answer: Answer) -> Skipped:
    reason, _, detail = (answer.error or "").partition(": ")
    return Skipped(task.questions[answer.number].label, task.name, Reason(reason), detail)


def ask(
    assistant: Assistant,
    work: Work,
    folder: AnswerFolder,
    *,
    sampling: Sampling,
    system: str | None,
    batch_size: int,
    say: Callable[[str], None],
) -> None:
    """Answer questions batch by batch; one that cannot be asked is kept with the reason in place of an answer."""
    began = said = time.monotonic()
    for place in range(0, len(work), batch_size):
        batch = work[place : place + batch_size]
        folder.append(_answers(assistant, batch, sampling, system))
        done, now = place + len(batch), time.monotonic()
        if now - said >= _SECONDS or done == len(work):
            said = now
            say(progress(done, len(work), now - began))


def _answers(assistant: Assistant, batch: Work, sampling: Sampling, system: str | None) -> Iterator[Answer]:
    prompts: list[tuple[Task, int, Sample]] = []
    for task, number in batch:
        try:
            sample = assistant.source.prompt(task.conversation(task.questions[number], system))
            assistant.check_length(sample)
            prompts.append((task, number, sample))
        except BadSample as error:
            yield _not_asked(task, number, error)
    if prompts:
        texts = assistant.answers([sample for _, _, sample in prompts], sampling)
        for (task, number, _), text in zip(prompts, texts, strict=True):
            yield Answer(task.name, number, text)


def progress(done: int, total: int, seconds: float) -> str:
    """Return how far an evaluation is, how fast, and how much longer it takes at that rate."""
    rate = done / seconds if seconds else 0.0
    left = f", {duration((total - done) / rate)} left" if rate and done < total else ""
    return f"{done:,} of {total:,} questions, {rounded(rate)} a second{left}"
