"""Write what a model says to the same prompts while it trains to RUN_DIR/samples: `answers.jsonl` and a page of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megavlm.files import replace_file
from megavlm.metrics.callback import Callback, Samples, Start, Stop
from megavlm.metrics.samples_page import Question, samples_page
from megavlm.metrics.sinks import JsonlSink
from megavlm.paths import open_regular

MOST_MOMENTS = 40  # iterations whose answers are on the page, and in memory

Answers = dict[Question, str]


class Moments:
    """Some of the iterations at which prompts were answered: all, then every second one, every fourth, … and the last.

    Which ones depends on how many there were and on nothing else, so that a resumed run shows those of a run that was
    never stopped.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, Answers]] = {}  # by their place among all
        self._number, self._stride = 0, 1
        self._last: tuple[int, Answers] | None = None

    def add(self, iteration: int, answers: Answers) -> None:
        """Add the newest one."""
        self._last = (iteration, answers)
        if self._number % self._stride == 0:
            self._kept[self._number] = self._last
        self._number += 1
        if len(self._kept) >= MOST_MOMENTS:
            self._stride *= 2
            self._kept = {place: each for place, each in self._kept.items() if place % self._stride == 0}

    def shown(self) -> list[tuple[int, Answers]]:
        """Return them from the oldest to the newest, at most `MOST_MOMENTS`."""
        found = list(self._kept.values())
        return found if self._last is None or (found and found[-1] is self._last) else [*found, self._last]

    def __len__(self) -> int:
        """Return how many there were."""
        return self._number


class SamplesSink(Callback):
    """Appends the answers of an iteration to `answers.jsonl`, as one line, and writes `index.html` anew."""

    def __init__(self, folder: Path, *, resume_iteration: int = 0) -> None:
        """Write to `folder`, and keep its answers up to `resume_iteration` (0: begin anew).

        Raises UserError if the lines cannot be read and written.
        """
        self._folder = folder
        self._lines = JsonlSink(folder / "answers.jsonl", resume_iteration=resume_iteration)
        self._moments = Moments()
        for iteration, answers in answers_of(folder / "answers.jsonl"):
            self._moments.add(iteration, answers)
        self._name, self._last = folder.parent.name, 0
        self._writable = True

    def on_start(self, start: Start) -> None:
        self._name, self._last = start.run_dir.resolve().name, start.train_iters

    def on_samples(self, samples: Samples) -> None:
        self._lines.write(
            {
                "iteration": samples.iteration,
                "answers": [
                    {"label": s.label, "prompt": s.prompt, "answer": s.answer, "reference": s.reference}
                    for s in samples.generations
                ],
            }
        )
        self._moments.add(samples.iteration, {_question(s): s.answer for s in samples.generations})
        pictures = {_question(s): s.images for s in samples.generations}
        page = samples_page(
            self._name, pictures, self._moments.shown(), answered=len(self._moments), train_iters=self._last
        )
        try:
            replace_file(self._folder / "index.html", page)
            self._writable = True
        except OSError as error:
            if self._writable:
                self._writable = False
                print(
                    f"warning: {self._folder}/index.html cannot be written ({error.strerror}): answers.jsonl beside it "
                    "has the answers",
                    file=sys.stderr,
                    flush=True,
                )

    def on_stop(self, stop: Stop) -> None:
        self._lines.on_stop(stop)


def answers_of(path: Path) -> Iterator[tuple[int, Answers]]:
    """Yield the iterations and the answers of the lines of a file that are complete."""
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError:  # JsonlSink has said so
        return
    for line in content.splitlines():
        try:
            record: Any = json.loads(line)
            answers = {
                Question(str(each["label"]), str(each["prompt"]), str(each["reference"])): str(each["answer"])
                for each in record["answers"]
            }
            yield int(record["iteration"]), answers
        except (ValueError, TypeError, KeyError, RecursionError):  # of another version, or edited
            continue


def _question(said: Any) -> Question:
    return Question(said.label, said.prompt, said.reference)
