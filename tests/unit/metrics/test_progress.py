"""Progress in a line, trackers beside the run, and a page of its answers."""

from __future__ import annotations

import io
import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from megavlm.command_line.parsing import parse
from megavlm.metrics.callback import Callback, Generation, Samples, Start, StepEnd, Stop
from megavlm.metrics.samples import MOST_MOMENTS, Question, SamplesSink, changes, samples_page
from megavlm.metrics.sinks import ProgressLine, duration
from megavlm.metrics.trackers import Background
from tests.support.html import told


def record(iteration: int, step_time: float = 2.0) -> dict[str, float | int | None]:
    return {
        "iteration": iteration,
        "skipped_samples": int(iteration in (4, 5)),
        "loss": 2.34567,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens_per_second": 12345.6,
        "step_time_s": step_time,
        "mfu": None,
    }


def test_a_file_gets_a_plain_line_every_interval_and_at_the_end() -> None:
    stream = io.StringIO()
    progress = ProgressLine(7, stream, log_interval=3)
    for iteration in range(1, 8):
        progress.on_step_end(StepEnd(record(iteration)))
    lines = stream.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["iteration 3/7", "iteration 6/7", "iteration 7/7"]
    assert lines[0] == (
        "iteration 3/7 | loss 2.3457 | grad norm 0.500 | lr 1.00e-03 | 12,346 tokens/s | step 2.000 s | ETA 0:08"
    )
    assert lines[1].endswith("step 2.000 s | 2 skipped | ETA 0:02")
    progress.on_step_end(StepEnd(record(7) | {"reward_margin": 0.25, "reward_accuracy": 0.9}))
    assert " | loss 2.3457 | margin 0.250 | 90% of pairs right | grad norm" in stream.getvalue().splitlines()[-1]
    progress.on_step_end(StepEnd(record(7) | {"reward_accuracy": 0.9, "chosen_share": 0.5}))
    assert " | loss 2.3457 | 90% of answers right | grad norm" in stream.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("step_times", "remaining", "eta"),
    [([60.0, 1.0, 1.0, 1.0, 1.0], 95, "1:35"), ([1.0] * 100 + [3.0] * 100, 1, "0:03")],
    ids=["one slow step does not move it", "it follows a lasting change"],
)
def test_the_eta_is_of_the_median_of_the_last_steps(step_times: list[float], remaining: int, eta: str) -> None:
    stream = io.StringIO()
    progress = ProgressLine(len(step_times) + remaining, stream)
    for iteration, step_time in enumerate(step_times, start=1):
        progress.on_step_end(StepEnd(record(iteration, step_time)))
    assert stream.getvalue().splitlines()[-1].endswith(f"ETA {eta}")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (42, "0:42"), (59.7, "1:00"), (725, "12:05"), (11220, "3:07:00"), (187200, "2 d 4:00:00")],
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Slow(Callback):
    """Waits until it is let go, and counts."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.heard: list[int | str] = []

    def on_step_end(self, step: StepEnd) -> None:
        self.begun.set()
        self.go.wait(60)
        self.heard.append(step.iteration)

    def on_stop(self, stop: Stop) -> None:
        self.heard.append(stop.state)


def step(iteration: int) -> StepEnd:
    return StepEnd({"iteration": iteration})


def test_calls_wait_in_a_bounded_queue_and_the_rest_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    slow = Slow()
    tracker = Background("x", lambda: slow, capacity=3)
    tracker.on_step_end(step(1))
    assert slow.begun.wait(60)
    for iteration in range(2, 9):  # returns at once, although the tracker waits
        tracker.on_step_end(step(iteration))
    slow.go.set()
    tracker.on_stop(Stop(8, "finished"))
    assert slow.heard == [1, 2, 3, 4, "finished"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "--tracker x is too slow" in line


def test_a_tracker_that_raises_is_told_once_without_secrets(capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")

    def make() -> Callback:
        raise SystemExit("no network\nfor key 0123456789abcdef")

    tracker = Background("x", make)
    for iteration in range(1, 5):
        tracker.on_step_end(step(iteration))
    tracker.on_stop(Stop(4, "failed"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line == ("warning: --tracker x fails (SystemExit: no network for key ***): the run goes on without it")


def test_the_end_of_a_run_waits_for_a_stuck_tracker_for_a_while_only(capsys: pytest.CaptureFixture[str]) -> None:
    slow = Slow()
    tracker = Background("x", lambda: slow)
    tracker.on_step_end(step(1))
    tracker.on_stop(Stop(1, "finished"), patience=0.05)
    assert "within 0.05 s" in capsys.readouterr().err
    slow.go.set()


PICTURE = np.full((30, 500, 3), 120, dtype=np.uint8)
WALL = Question("walls.jsonl:3", "What is it?", "a grey wall")


def samples(iteration: int, answer: str | None = None, question: Question = WALL) -> Samples:
    said = f"answer {iteration}" if answer is None else answer
    return Samples(iteration, [Generation(question.prompt, said, question.reference, [PICTURE], question.label)])


def write(folder: Path, *iterations: int, resume: int = 0) -> str:
    sink = SamplesSink(folder / "samples", resume_iteration=resume)
    sink.on_start(Start(folder, parse(["--train-iters", "90"]), resume, 1, "CPU"))
    for iteration in iterations:
        sink.on_samples(samples(iteration))
    sink.on_stop(Stop(iterations[-1], "finished"))
    return (folder / "samples" / "index.html").read_text()


def test_what_a_model_says_is_text(tmp_path: Path) -> None:
    evil = '<script>alert(1)</script> & "it" </div>'
    question = Question(evil, f"asked {evil}", f"right {evil}")
    page = samples_page(
        evil, {question: [PICTURE]}, [(0, {question: evil}), (3, {question: ""})], answered=2, train_iters=9
    )
    words = told(page)
    assert words.count(evil) >= 4
    assert f"Samples of “{evil}”" in words
    assert "(nothing)" in words
    body = page.partition("</style>")[2]
    assert "<script" not in body
    assert not re.findall(r"(?:src|href)=\"(?!data:image/)", body)
    assert 'width="320" height="19"' in body


def test_an_answer_comes_once_for_the_iterations_in_which_it_stayed() -> None:
    found = changes([(0, "a"), (10, "b"), (20, "b"), (30, "a"), (40, "c")])
    assert [tuple(each) for each in found] == [(40, 40, "c"), (30, 30, "a"), (10, 20, "b"), (0, 0, "a")]


@pytest.mark.parametrize("number", [1, 2, MOST_MOMENTS - 1, MOST_MOMENTS, 500])
def test_a_page_does_not_grow_for_ever(tmp_path: Path, number: int) -> None:
    page = write(tmp_path / "run", *range(0, 10 * number, 10))
    shown = set(re.findall(r"answer (\d+)<", page))
    assert min(number, MOST_MOMENTS // 2) <= len(shown) <= MOST_MOMENTS
    assert {"0", str(10 * (number - 1))} <= shown


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    whole = write(tmp_path / "a" / "run", *range(0, 60, 10))
    write(tmp_path / "b" / "run", *range(0, 40, 10))
    assert write(tmp_path / "b" / "run", *range(20, 60, 10), resume=10) == whole
    lines = [json.loads(line) for line in (tmp_path / "b/run/samples/answers.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(0, 60, 10))
    assert lines[2]["answers"] == [
        {**dict(zip(("label", "prompt", "reference"), WALL, strict=True)), "answer": "answer 20"}
    ]
    assert "50 of 90" in told(whole)
    assert "answer 20" not in write(tmp_path / "b" / "run", 0)


def test_damaged_lines_cost_no_other(tmp_path: Path) -> None:
    write(tmp_path, 0, 10)
    path = tmp_path / "samples" / "answers.jsonl"
    path.write_text(path.read_text() + '{"iteration": 11, "answers": [3]}\n{"iteration": 12, "answ')
    SamplesSink(tmp_path / "samples", resume_iteration=20).on_samples(samples(20))
    words = told((tmp_path / "samples" / "index.html").read_text())
    assert all(f"answer {iteration}" in words for iteration in (0, 10, 20))
