"""Tasks: files of questions about images and videos with reference answers (docs/after-training.md has the format)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megavlm.config.messages import shown
from megavlm.data.records.arrays import NotAnArray, array_spans
from megavlm.data.records.pictures import file_below, image_of
from megavlm.data.records.spans import BOM, SpanFile, line_spans
from megavlm.data.records.videos import video_below, video_of
from megavlm.data.types import BadSample, Conversation, Turn, Visual
from megavlm.errors import UserError
from megavlm.evaluation.choices import LETTERS, chosen_letter, question_with_choices
from megavlm.evaluation.metrics import ANNOTATORS, METRICS
from megavlm.paths import open_regular

_OPTIONS = ("image_root", "metric", "name")


@dataclass(frozen=True)
class TaskOption:
    """`--task FILE[,image_root=DIR][,metric=METRIC][,name=NAME]`."""

    path: Path
    image_root: Path
    name: str
    metric: str | None = None


@dataclass(frozen=True)
class Question:
    """A record of a task. `images` and `videos` are its values, of which the files are found when they are needed."""

    label: str  # as in `task.jsonl:18`
    text: str
    images: tuple[Any, ...]
    references: tuple[str, ...]
    metric: str
    choices: tuple[str, ...] = ()
    videos: tuple[Any, ...] = ()
    fps: Any = None  # of its videos

    def score(self, answer: str) -> float:
        return METRICS[self.metric].score(answer, self.references, self.choices)

    @property
    def asked(self) -> str:
        """Return the question as the model reads it."""
        return question_with_choices(self.text, self.choices)


@dataclass(frozen=True)
class Task:
    """All questions of a file, and the folder that their images and videos lie in."""

    name: str
    image_root: Path
    questions: tuple[Question, ...]

    def pictures(self, question: Question) -> list[Visual]:
        """Return a question's images, then its videos. Raises BadSample for one that is missing or outside of the image
        root.
        """
        find, find_video = partial(file_below, self.image_root), partial(video_below, self.image_root)
        images = [image_of(image, find) for image in question.images]
        return [*images, *(video_of(video, find_video, question.fps) for video in question.videos)]

    def conversation(self, question: Question, system: str | None) -> Conversation:
        """Return the turns before the answer. Raises BadSample as `pictures` does."""
        opening = (Turn("system", (system,)),) if system else ()
        return Conversation((*opening, Turn("user", (*self.pictures(question), question.asked))))

    @property
    def digest(self) -> str:
        """Return a hash of what a model is asked, so that other metrics or references leave it as it is."""
        total = hashlib.sha256()
        for question in self.questions:
            videos = (question.videos, question.fps) if question.videos else ()
            total.update(repr((question.asked, question.images, *videos)).encode())
        return total.hexdigest()


def task_option(text: str) -> TaskOption:
    """Return what `--task` was given. Raises UserError."""
    path, *pairs = text.split(",")
    options: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in _OPTIONS or not value:
            raise UserError(f"--task {text}: {pair!r} is not one of image_root=DIR, metric=METRIC, name=NAME")
        options[name] = value
    metric = options.get("metric")
    if metric is not None:
        _check_metric(metric, f"--task {text}")
    root = Path(options.get("image_root", Path(path).parent))
    if not root.is_dir():
        raise UserError(f"--task {text}: {root} is not a folder: image_root= names the one with the images")
    return TaskOption(Path(path), root, options.get("name", Path(path).stem), metric)


def read_task(option: TaskOption) -> Task:
    """Return the questions of a file, JSON Lines or a JSON array. Raises UserError, which names a bad record."""
    records = _open(option.path)
    questions = []
    for number in range(len(records)):
        label = records.label(number)
        try:
            questions.append(_question(records.read(number), label, option.metric))
        except BadSample as error:
            raise UserError(f"--task {label} cannot be read: {error.detail}") from error
    return Task(option.name, option.image_root, tuple(questions))


def _open(path: Path) -> SpanFile:
    try:
        with open_regular(path) as file:
            head = file.read(4096)
        if not head.strip():
            raise UserError(f"--task {path} is empty: write one question per line")
        if head.removeprefix(BOM).lstrip()[:1] == b"[":
            return SpanFile(path, array_spans(path), content="array")
        return SpanFile(path, line_spans(path), content="lines")
    except OSError as error:
        raise UserError(f"--task {path} cannot be read: {error.strerror or error}") from error
    except NotAnArray as error:
        raise UserError(f"--task {path} is no JSON array ({error}): write one question per line") from error


def _question(record: Any, label: str, metric: str | None) -> Question:
    where = f"--task {label}"
    if not isinstance(record, Mapping):
        raise UserError(f"{where} is {shown(record)}, and a question is an object with fields")
    text = record.get("question")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where} has no field `question` with a text")
    images, videos = _values(record, "images", "image"), _values(record, "videos", "video")
    references = _texts(record.get("answers", record.get("answer")), where, "answers")
    choices = _texts(record["choices"], where, "choices") if record.get("choices") is not None else ()
    chosen = metric or record.get("metric") or ("multiple_choice" if choices else "exact_match")
    _check_metric(chosen, where)
    question = Question(label, text, images, references, chosen, choices, videos, record.get("fps"))
    _check_references(question, where)
    return question


def _values(record: Mapping[str, Any], several: str, one: str) -> tuple[Any, ...]:
    value = record.get(several, record.get(one))
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def _texts(value: Any, where: str, field: str) -> tuple[str, ...]:
    """Return a text or a list of texts, numbers included, as texts."""
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in values):
        raise UserError(f"{where} needs a field `{field}` with one text or a list of texts, and has {shown(value)}")
    return tuple(map(str, values))


def _check_metric(metric: Any, where: str) -> None:
    if metric not in METRICS:
        raise UserError(f"{where}: metric {shown(metric)} is not one of {', '.join(METRICS)}")


def _check_references(question: Question, where: str) -> None:
    """Raise UserError for references that a metric cannot score."""
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
    """Raise UserError for two tasks of one name, whose answers could not be told apart."""
    names = [option.name for option in options]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--task has two tasks named {double}: set different names (name=…)")
    if bad := next((name for name in names if "/" in name or name.startswith(".")), None):
        raise UserError(f"--task name={bad} must be a plain name: it becomes part of a file's")
