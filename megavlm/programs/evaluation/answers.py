"""Answers that are kept while a task runs: a line for each, appended, so that a second run continues."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megavlm.errors import UserError
from megavlm.files import open_to_append, replace_file
from megavlm.json_files import read_json
from megavlm.paths import open_regular

SETTINGS = "settings.json"


@dataclass(frozen=True)
class Answer:
    """What the model said to question `number` of a task; "" and why (`error`) where it could not be asked."""

    task: str
    number: int
    text: str
    error: str | None = None


class AnswerFolder:
    """The answers in a folder: each process appends to a file of its own, and all of them count."""

    def __init__(self, path: Path, *, rank: int) -> None:
        self.path = path
        self._file = path / f"answers-{rank}.jsonl"

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Note what the answers are of. Raises UserError if the folder has answers of something else."""
        file = self.path / SETTINGS
        self.path.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(json.dumps(settings))
        if file.exists():
            saved = read_json(file)
            if changed := next((name for name in wanted if saved.get(name) != wanted[name]), None):
                raise UserError(
                    f"{self.path} has answers with another {changed}: continue with the same, name another folder with "
                    "--out, or delete this one"
                )
            return
        replace_file(file, json.dumps(wanted, indent=2) + "\n")

    def read(self) -> dict[tuple[str, int], Answer]:
        """Return the answers by task and number; a line that was cut short when a process was killed is no answer."""
        found = {}
        for file in sorted(self.path.glob("answers-*.jsonl")):
            for answer in _lines(file):
                found[answer.task, answer.number] = answer
        return found

    def forget_unasked(self) -> None:
        """Remove the answers of questions that could not be asked, so that the next command asks them. No other
        process may be answering.
        """
        for file in self.path.glob("answers-*.jsonl"):
            replace_file(file, _written(answer for answer in list(_lines(file)) if answer.error is None))

    def append(self, answers: Iterable[Answer]) -> None:
        """Write answers to the end of this process's file, on a line of their own, and hand them to the system."""
        lines = _written(answers)
        with open_to_append(self._file, buffering=-1) as file:
            if (end := file.tell()) and os.pread(file.fileno(), 1, end - 1) != b"\n":
                file.write(b"\n")
            file.write(lines)


def _written(answers: Iterable[Answer]) -> bytes:
    lines = (f"{json.dumps(asdict(answer), ensure_ascii=False)}\n" for answer in answers)
    return "".join(lines).encode("utf-8", "surrogatepass")


def _lines(file: Path) -> Iterator[Answer]:
    with open_regular(file) as opened:
        lines = opened.read().splitlines()
    for line in lines:
        try:
            yield Answer(**json.loads(line))
        except (ValueError, TypeError):
            continue
