"""Write a model's answers to fixed prompts during training: RUN_DIR/samples/answers.jsonl and an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from megavlm.files import replace_file
from megavlm.html import document, facts, picture
from megavlm.metrics.callback import Callback, Samples, Start, Stop
from megavlm.metrics.sinks import JsonlSink
from megavlm.resilience.events import json_lines

_SIDE = 320  # pixels of the longer side of a picture
_HEADLINE = 160  # characters of a prompt that are a headline; a longer one is text


class Question(NamedTuple):
    """A held-out prompt and its reference. Answers with equal label, prompt and reference are shown together."""

    label: str
    prompt: str
    reference: str


class Said(NamedTuple):
    """An answer that stayed the same from the iteration `first` to `last`."""

    first: int
    last: int
    text: str


def samples_page(
    name: str,
    pictures: Mapping[Question, Sequence[Any]],
    moments: Sequence[tuple[int, Mapping[Question, str]]],
    *,
    answered: int,
    train_iters: int,
) -> str:
    """Return the HTML page of a run's samples. All text is escaped, the model's answers too.

    Args:
        name: name of the run.
        pictures: images [height, width, 3] by question, in the order in which the questions are shown.
        moments: pairs of an iteration and its answers by question, from the oldest to the newest.
        answered: number of iterations with answers, including those that are not shown.
        train_iters: last iteration of the run; 0 if unknown.
    """
    newest, latest = moments[-1]
    right = sum(_same(latest.get(question, ""), question.reference) for question in pictures)
    shown = f"{len(moments):,}" + (f" of {answered:,}" if answered > len(moments) else "")
    about = (
        ("iteration", f"{newest:,} of {train_iters:,}" if train_iters else f"{newest:,}"),
        ("prompts", f"{len(pictures):,}"),
        ("equal to the reference", f"{right:,} of {len(pictures):,}"),
        ("times shown", shown),
    )
    title = f"Samples of “{name}”"
    head = (
        f'<header><h1>{escape(title)}</h1>{facts(about)}<p class="quiet">Held-out prompts, the same at each time. The '
        "newest answer comes first; the number beside an answer is the iteration after which the model gave it (0: "
        "before training). ✓ marks an answer equal to "
        "the reference.</p></header>"
    )
    return document(title, [head, *(_card(question, pictures[question], moments) for question in pictures)])


def changes(answers: Sequence[tuple[int, str]]) -> list[Said]:
    """Merge consecutive equal answers, given as (iteration, text), into ranges of iterations, the newest first."""
    found = []
    for text, times in groupby(answers, key=lambda each: each[1]):
        iterations = [iteration for iteration, _ in times]
        found.append(Said(iterations[0], iterations[-1], text))
    return found[::-1]


def _card(question: Question, images: Sequence[Any], moments: Sequence[tuple[int, Mapping[Question, str]]]) -> str:
    ranges = changes([(iteration, answers[question]) for iteration, answers in moments if question in answers])
    rows = [_row(said, question.reference) for said in ranges]
    reference = f'<li class="right"><b>reference</b><div>{escape(question.reference)}</div></li>'
    seen = f'<div class="images">{"".join(picture(image, side=_SIDE) for image in images)}</div>' if len(images) else ""
    look = ' class="long"' if len(question.prompt) > _HEADLINE else ""
    asked = f'<h2{look}>{escape(question.prompt) or "(no words)"}</h2><p class="quiet">{escape(question.label)}</p>'
    newest = f'<ol class="said">{reference}{"".join(rows)}</ol>'
    return f'<section class="asked{"" if seen else " blind"}">{seen}<div>{asked}{newest}</div></section>'


def _row(said: Said, reference: str) -> str:
    times = f"{said.first:,}" + (f"–<wbr>{said.last:,}" if said.last > said.first else "")
    sign = ' <span title="equal to the reference">✓</span>' if _same(said.text, reference) else ""
    text = escape(said.text) or '<span class="quiet">(nothing)</span>'
    return f"<li><b>{times}{sign}</b><div>{text}</div></li>"


def _same(answer: str, reference: str) -> bool:
    return answer.strip() == reference.strip()


MOST_MOMENTS = 40  # iterations whose answers are on the page, and in memory

Answers = dict[Question, str]


class SamplesSink(Callback):
    """Appends the answers of each sampled iteration to `answers.jsonl`, as one line, and rewrites `index.html`."""

    def __init__(self, folder: Path, *, resume_iteration: int = 0) -> None:
        """Open `folder` and keep its answers up to `resume_iteration` (0: delete them).

        Raises UserError if `answers.jsonl` cannot be read and written.
        """
        self._folder = folder
        self._lines = JsonlSink(folder / "answers.jsonl", resume_iteration=resume_iteration)
        self._moments = list(answers_of(folder / "answers.jsonl"))
        self._name, self._last = folder.parent.name, 0

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
        self._moments.append((samples.iteration, {_question(s): s.answer for s in samples.generations}))
        pictures = {_question(s): s.images for s in samples.generations}
        page = samples_page(
            self._name, pictures, _shown(self._moments), answered=len(self._moments), train_iters=self._last
        )
        replace_file(self._folder / "index.html", page)

    def on_stop(self, stop: Stop) -> None:
        self._lines.on_stop(stop)


def answers_of(path: Path) -> Iterator[tuple[int, Answers]]:
    """Yield (iteration, answers by question) for each complete and valid line of `answers.jsonl`."""
    for record in json_lines(path):
        with suppress(ValueError, TypeError, KeyError):  # of another version, or edited
            answers = {
                Question(str(each["label"]), str(each["prompt"]), str(each["reference"])): str(each["answer"])
                for each in record["answers"]
            }
            yield int(record["iteration"]), answers


def _shown(moments: Sequence[tuple[int, Answers]]) -> list[tuple[int, Answers]]:
    """Return at most `MOST_MOMENTS` of the sampled iterations: evenly spaced from the first, and the last."""
    stride = -(-len(moments) // (MOST_MOMENTS - 1))
    shown = list(moments[::stride])
    return shown if shown[-1] is moments[-1] else [*shown, moments[-1]]


def _question(said: Any) -> Question:
    return Question(said.label, said.prompt, said.reference)
