"""Generate the answers to tasks and append each to a file of JSON lines, so that an interrupted run resumes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megavlm.data.types import Sample
from megavlm.errors import UserError
from megavlm.files import open_to_append, replace_file
from megavlm.inference.assistant import Assistant, Sampling
from megavlm.inputs.bad_sample import BadSample, Skipped, SkipSummary
from megavlm.json_files import read_json
from megavlm.programs.evaluation.task import Task
from megavlm.programs.history import duration
from megavlm.resilience.events import json_lines

Work = Sequence[tuple[Task, int]]  # questions by task and number
_MOST_UNREADABLE = 0.05  # largest share of a task's questions; with more, a score would say nothing about the task


def remaining(tasks: Sequence[Task], folder: AnswerFolder, *, rank: int = 0, world: int = 1) -> list[tuple[Task, int]]:
    """Return the questions of rank `rank` of `world` that have no answer yet.

    The rank of a question does not depend on the answers so far, so that ranks that start at different times need not
    agree.
    """
    done = folder.read().keys()
    everything = [(task, number) for task in tasks for number in range(len(task.questions))]
    return [(task, number) for task, number in everything[rank::world] if (task.name, number) not in done]


def refuse_unreadable(tasks: Sequence[Task]) -> None:
    """Raise UserError, with the commonest reason, if over 5 % of a task's questions lack their images or videos."""
    for task in tasks:
        failed: list[Skipped] = []
        for question in task.questions:
            try:
                task.pictures(question)
            except BadSample as error:
                failed.append(Skipped(question.label, task.name, error.reason, error.detail))
        if len(failed) > _MOST_UNREADABLE * len(task.questions):
            raise UserError(
                f"--task {task.name}: {len(failed):,} of {len(task.questions):,} questions could not be asked: "
                f"{SkipSummary().add(failed).message()}"
            )


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
    """Answer questions batch by batch and append the answers, or the reasons why questions cannot be asked."""
    began = time.monotonic()
    for place in range(0, len(work), batch_size):
        batch = work[place : place + batch_size]
        folder.append(_answers(assistant, batch, sampling, system))
        say(how_far(place + len(batch), len(work), time.monotonic() - began))


def _answers(assistant: Assistant, batch: Work, sampling: Sampling, system: str | None) -> Iterator[Answer]:
    prompts: list[tuple[Task, int, Sample]] = []
    for task, number in batch:
        try:
            sample = assistant.source.prompt(task.conversation(task.questions[number], system))
            assistant.check_length(sample)
            prompts.append((task, number, sample))
        except BadSample as error:
            yield Answer(task.name, number, "", f"{error.reason}: {error.detail}")
    if prompts:
        texts = assistant.answers([sample for _, _, sample in prompts], sampling)
        for (task, number, _), text in zip(prompts, texts, strict=True):
            yield Answer(task.name, number, text)


def how_far(done: int, total: int, seconds: float) -> str:
    """Return a line on progress: questions done, questions per second, and the time left."""
    rate = done / seconds if seconds else 0.0
    left = f", {duration((total - done) / rate)} left" if rate and done < total else ""
    return f"{done:,} of {total:,} questions, {rate:.3g} a second{left}"


SETTINGS = "settings.json"


@dataclass(frozen=True)
class Answer:
    """The model's answer to question `number` of a task; "" and the reason (`error`) if it could not be asked."""

    task: str
    number: int
    text: str
    error: str | None = None


class AnswerFolder:
    """A folder of answers. Each process appends to a file of its own; the files of all processes are read."""

    def __init__(self, path: Path, *, rank: int) -> None:
        self.path = path
        self._file = path / f"answers-{rank}.jsonl"

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Write the settings of the answers to the folder, beside tasks that it has answers to. Raises UserError if its
        answers have other settings.
        """
        file = self.path / SETTINGS
        self.path.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(json.dumps(settings))
        if file.exists():
            saved = read_json(file)
            new = {name for name in wanted if name.startswith("task ") and name not in saved}
            if changed := next((name for name in wanted if name not in new and saved.get(name) != wanted[name]), None):
                raise UserError(
                    f"{self.path} has answers with another {changed}: continue with the same, name another folder with "
                    "--out, or delete this one"
                )
            wanted = saved | wanted
        replace_file(file, json.dumps(wanted, indent=2) + "\n")

    def read(self) -> dict[tuple[str, int], Answer]:
        """Return the answers by task and number; incomplete lines, as of a killed process, are skipped."""
        found = {}
        for file in sorted(self.path.glob("answers-*.jsonl")):
            for line in json_lines(file):
                with suppress(TypeError):  # a line with other fields
                    answer = Answer(**line)
                    found[answer.task, answer.number] = answer
        return found

    def append(self, answers: Iterable[Answer]) -> None:
        """Append answers to this process's file, a line each; a last line that was cut short is ended first."""
        lines = "".join(f"{json.dumps(asdict(answer), ensure_ascii=False)}\n" for answer in answers)
        with open_to_append(self._file, buffering=-1) as file:
            if (end := file.tell()) and os.pread(file.fileno(), 1, end - 1) != b"\n":
                file.write(b"\n")
            file.write(lines.encode("utf-8", "surrogatepass"))
