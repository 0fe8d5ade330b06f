"""Tasks: files of questions about images, videos and sounds, with references (docs/after-training.md: the format)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megavlm.config.messages import shown
from megavlm.config.option import option
from megavlm.config.schema import DatasetConfig
from megavlm.data.records.opening import RawRecords, open_rows
from megavlm.data.records.turns import listed, visuals_of
from megavlm.data.types import Conversation, Turn, Visual
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample
from megavlm.programs.evaluation.metrics import ANNOTATORS, LETTERS, METRICS, chosen_letter, question_with_choices
from megavlm.rules.fields import record_of_word


@dataclass(frozen=True)
class TaskOption:
    """The keys of `--task PATH[,image_root=DIR][,columns=…][,metric=METRIC][,name=NAME]`."""

    path: str = option("", "File of questions.")
    image_root: str | None = option(None, "Folder of the images; default: the file's.")
    columns: Mapping[str, str] | None = option(None, "Other names of fields.")
    metric: str | None = option(None, "Metric; default: what each record says.")
    name: str | None = option(None, "Name in the scores; default: the file's.")

    @property
    def task_name(self) -> str:
        return self.name or Path(self.path).stem


@dataclass(frozen=True)
class TaskQuestion:
    """A question of a task: the fields of record `number`. Images and videos are read only when needed."""

    number: int
    label: str  # as in `task.jsonl:18`
    text: str
    references: tuple[str, ...]
    metric: str
    choices: tuple[str, ...]
    pictures: bool  # whether it has images, videos or sounds
    digest: bytes  # hash of question, choices, images, videos and sounds

    def score(self, answer: str) -> float:
        return METRICS[self.metric].score(answer, self.references, self.choices)

    @property
    def asked(self) -> str:
        """Return the question with its lettered choices, if any, as the model is asked."""
        return question_with_choices(self.text, self.choices)


@dataclass(frozen=True)
class Task:
    """All questions of a file, and its raw records, which find the images and videos."""

    name: str
    questions: tuple[TaskQuestion, ...]
    raw: RawRecords

    def pictures(self, question: TaskQuestion) -> list[Visual]:
        """Return a question's images, videos and sounds. Raises BadSample if one is missing or outside the root."""
        if not question.pictures:
            return []
        return [*chain(*visuals_of(self.raw.records.read(question.number), self.raw.find, self.raw.find_video))]

    def conversation(self, question: TaskQuestion, system: str | None) -> Conversation:
        """Return the turns of the prompt: system turn, if any, and question. Raises BadSample as `pictures` does."""
        opening = (Turn("system", (system,)),) if system else ()
        return Conversation((*opening, Turn("user", (*self.pictures(question), question.asked))))

    @property
    def digest(self) -> str:
        """Return a hash of all questions as the model is asked; it does not depend on metrics or references."""
        return hashlib.sha256(b"".join(question.digest for question in self.questions)).hexdigest()


def task_option(text: str) -> TaskOption:
    """Parse a value of `--task`. Raises UserError for a wrong key or metric."""
    found: TaskOption = record_of_word(TaskOption, text, name="--task")
    if found.metric is not None:
        _check_metric(found.metric, f"--task {text}")
    return found


def read_task(option: TaskOption) -> Task:
    """Read the questions of a file of records in any format. Raises UserError, which names a bad record."""
    source = DatasetConfig(path=option.path, image_root=option.image_root, columns=option.columns)
    raw = open_rows(source, "--task")
    questions = []
    for number in range(len(raw.records)):
        label = raw.records.label(number)
        try:
            questions.append(_question(raw.records.read(number), number, label, option.metric))
        except BadSample as error:
            raise UserError(f"--task {label} cannot be read: {error.detail}") from error
    return Task(option.task_name, tuple(questions), raw)


def _question(record: Any, number: int, label: str, metric: str | None) -> TaskQuestion:
    where = f"--task {label}"
    if not isinstance(record, Mapping):
        raise UserError(f"{where} is {shown(record)}, and a question is an object with fields")
    text = record.get("question")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where} has no field `question` with a text: write one, or add columns=question:NAME")
    references = _texts(record, where, "answers", "answer")
    choices = _texts(record, where, "choices") if record.get("choices") is not None else ()
    chosen = metric or record.get("metric") or ("multiple_choice" if choices else "exact_match")
    _check_metric(chosen, where)
    images, videos, sounds = (listed(record, f"{kind}s", kind) for kind in ("image", "video", "audio"))
    asked = (question_with_choices(text, choices), images, videos, record.get("fps") if videos else None)
    digest = hashlib.sha256(repr((*asked, *filter(None, [sounds]))).encode()).digest()
    question = TaskQuestion(number, label, text, references, chosen, choices, bool(images or videos or sounds), digest)
    _check_references(question, where)
    return question


def _texts(record: Mapping[str, Any], where: str, *fields: str) -> tuple[str, ...]:
    """Return the texts of a field with a text, a number, or a list of them. Raises UserError for other values."""
    values = listed(record, *fields)
    if not values or not all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in values):
        raise UserError(
            f"{where} needs a field `{fields[0]}` with one text or a list of texts, and has {shown(values or None)}"
        )
    return tuple(map(str, values))


def _check_metric(metric: Any, where: str) -> None:
    if metric not in METRICS:
        raise UserError(f"{where}: metric {shown(metric)} is not one of {', '.join(METRICS)}")


def _check_references(question: TaskQuestion, where: str) -> None:
    """Raise UserError for references or choices that the question's metric cannot score."""
    given = len(question.references)
    if question.metric == "vqa" and given != ANNOTATORS:
        raise UserError(
            f"{where}: metric vqa compares with the answers of {ANNOTATORS} annotators, and there are {given}: write "
            "them all, also equal ones, or use exact_match"
        )
    if question.metric != "multiple_choice":
        return
    if not 2 <= len(question.choices) <= len(LETTERS):
        raise UserError(
            f"{where}: multiple_choice needs 2 to {len(LETTERS)} `choices`, and has {len(question.choices)}"
        )
    if unknown := [each for each in question.references if chosen_letter(each, question.choices) is None]:
        raise UserError(f"{where}: the answer {shown(unknown[0])} is neither the letter nor the text of a choice")


def check_names(options: Sequence[TaskOption]) -> None:
    """Raise UserError for two tasks of one name."""
    names = [option.task_name for option in options]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--task has two tasks named {double}: set different names (name=…)")
