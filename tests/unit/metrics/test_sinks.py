"""What is written of a run: files, the terminal, and what users' own callbacks get."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megavlm.errors import UserError
from megavlm.metrics.callback import Callback, Generation, Samples, Saved, StepEnd, Stop
from megavlm.metrics.sinks import JsonlSink, kept_lines, lost_steps
from megavlm.metrics.tracker_clients import TensorBoardSink
from megavlm.metrics.trackers import tagged
from megavlm.resilience import events
from megavlm.resilience.phases import Phases
from megavlm.train.hooks.hook import Callbacks
from megavlm.train.outputs import load
from tests.support.user_callbacks import Broken, Diary

END = Stop(0, "finished")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, *, first: int, last: int, resume_iteration: int = 0) -> None:
    sink = JsonlSink(path, resume_iteration=resume_iteration)
    for iteration in range(first, last + 1):
        sink.on_step_end(StepEnd({"iteration": iteration, "loss": 1 / iteration, "mfu": None}))
    sink.on_stop(END)


@given(st.floats(allow_nan=False))
def test_a_float_reads_back_as_the_same_float(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.on_step_end(StepEnd({"iteration": 1, "loss": value, "grad_norm": np.float64(value)}))
    sink.on_stop(END)
    [record] = records(path)
    assert record["loss"].hex() == record["grad_norm"].hex() == value.hex()


def test_a_file_that_no_run_wrote_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n')
    os.truncate(path, 2**40)
    assert lost_steps(path, resume_iteration=0) == {"lost_steps": None, "last_lost": None}
    with pytest.raises(UserError, match=r"has 1099511627776 bytes, more than .*: move it away"):
        JsonlSink(path, resume_iteration=1)
    monkeypatch.setattr(events, "_LONGEST", 20)
    path.write_text('{"iteration": 1}\n{"iteration": 2, "x": "' + "x" * 50 + '"}\n{"iteration": 3}\n')
    assert events.json_lines(path) == [{"iteration": 1}, {"iteration": 3}]


def test_a_line_is_readable_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "RUN" / "metrics.jsonl")
    sink.on_step_end(StepEnd({"iteration": 1, "loss": 0.5}))
    assert records(tmp_path / "RUN" / "metrics.jsonl") == [{"iteration": 1, "loss": 0.5}]
    sink.on_stop(END)


def test_kill_9_loses_no_logged_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import os, signal, sys; from pathlib import Path; from megavlm.metrics.sinks import JsonlSink\n"
        "from megavlm.metrics.callback import StepEnd\n"
        "sink = JsonlSink(Path(sys.argv[1]))\n"
        "for i in range(1, 8): sink.on_step_end(StepEnd({'iteration': i}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[3]
    killed = subprocess.run(
        [sys.executable, "-c", program, str(path)], env={**os.environ, "PYTHONPATH": str(root)}, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert [record["iteration"] for record in records(path)] == list(range(1, 8))


@pytest.mark.parametrize("resume", [0, 1, 6, 10])
def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path: Path, resume: int) -> None:
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write(whole, first=1, last=12)
    write(resumed, first=1, last=10)
    write(resumed, first=resume + 1, last=12, resume_iteration=resume)
    assert resumed.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("torn", [b"{", b'{"iteration": 3, "lo', b'{"iteration": 3, "loss": 0.\xff', b"\0\0\0\n"])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, first=1, last=2)
    before = path.read_bytes()
    path.write_bytes(before + torn)
    JsonlSink(path, resume_iteration=5).on_stop(END)
    assert path.read_bytes() == before


@given(cut=st.integers(0, 120), resume=st.integers(0, 6))
def test_what_is_kept_is_a_prefix_of_whole_records(cut: int, resume: int) -> None:
    lines = [json.dumps({"iteration": i, "loss": i / 3}).encode() + b"\n" for i in range(1, 5)]
    content = b"".join(lines)[:cut]
    # A line counts as soon as its closing brace is there.
    complete = sum(cut >= len(b"".join(lines[: i + 1])) - 1 for i in range(len(lines)))
    assert kept_lines(content, resume_iteration=resume) == (b"".join(lines[: min(complete, resume)]), 0)


@pytest.mark.parametrize("damage", [b"garbage", b"[" * 100_000, b"\xff\xfe", b"[]", b"{}"])
def test_a_damaged_line_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, first=1, last=5)
    before = path.read_bytes()
    path.write_bytes(damage + b"\n" + before)
    write(path, first=5, last=5, resume_iteration=4)
    assert path.read_bytes() == before
    assert "1 lines of" in capsys.readouterr().out


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path)])
def test_a_path_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        JsonlSink(tmp_path / "metrics.jsonl")


def test_lines_wait_until_a_full_disk_has_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.on_step_end(StepEnd({"iteration": 1}))
    file = sink._lines._file.fileno()
    disk, full = os.dup(file), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file)
    sink.on_step_end(StepEnd({"iteration": 2}))
    sink.on_step_end(StepEnd({"iteration": 3}))
    os.dup2(disk, file)
    assert [record["iteration"] for record in records(path)] == [1]
    assert capsys.readouterr().err.count("No space left") == 1
    sink.on_step_end(StepEnd({"iteration": 4}))
    assert [record["iteration"] for record in records(path)] == [1, 2, 3, 4]
    sink.on_stop(END)


def test_a_save_closes_the_file_so_that_a_bucket_gets_it(tmp_path: Path) -> None:
    sink = JsonlSink(path := tmp_path / "metrics.jsonl")
    sink.on_step_end(StepEnd({"iteration": 1}))
    before = sink._lines._file
    sink.on_save(Saved(1, tmp_path, 0.1))
    assert before.closed
    sink.on_step_end(StepEnd({"iteration": 2}))
    assert [record["iteration"] for record in records(path)] == [1, 2]
    sink.on_stop(END)


def test_tensorboard_charts_numbers_and_purges_on_resume(tmp_path: Path) -> None:
    lost = TensorBoardSink(tmp_path)
    lost.on_step_end(StepEnd({"iteration": 2, "loss": 9.0}))
    lost.on_stop(END)
    first = TensorBoardSink(tmp_path)  # the run before has left no checkpoint
    for iteration in range(1, 6):
        first.on_step_end(
            StepEnd({"iteration": iteration, "loss": float(iteration), "tokens": 8, "mfu": None, "device": "CPU"})
        )
    first.on_stop(END)
    resumed = TensorBoardSink(tmp_path, resume_iteration=3)
    resumed.on_step_end(StepEnd({"iteration": 4, "loss": 40.0, "tokens": 8, "mfu": None}))
    resumed.on_stop(END)
    charts = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(charts.Tags()["scalars"]) == ["data/tokens", "train/loss"]
    assert [(point.step, point.value) for point in charts.Scalars("train/loss")] == [
        *((1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0))
    ]


def test_tensorboard_shows_samples_with_their_pictures(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    picture = np.full((4, 6, 3), 200, dtype=np.uint8)
    for iteration, answer in ((0, "# a\n*wall*"), (3, "a wall")):
        said = [Generation("What is it?", answer, "a grey wall", [picture], "walls.jsonl:7")]
        sink.on_samples(Samples(iteration, said))
    sink.on_stop(END)
    shown = EventAccumulator(str(tmp_path)).Reload()
    (image,) = shown.Images("samples/0/0")
    assert (image.step, image.width, image.height) == (0, 6, 4)
    told = [text.tensor_proto.string_val[0].decode() for text in shown.Tensors("samples/0/text_summary")]
    assert told[1] == "walls.jsonl:7:\n\n    What is it?\n\nanswer:\n\n    a wall\n\nreference:\n\n    a grey wall"
    assert "\n    # a\n    *wall*\n" in told[0], "no Markdown"


def test_a_run_that_resumes_learns_which_steps_were_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert lost_steps(path, resume_iteration=3) == {"lost_steps": None, "last_lost": None}
    path.write_text(
        "".join(json.dumps({"iteration": i, "time": f"T{i}"}) + "\n" for i in range(1, 8)) + '{"iteration": 8, "ti'
    )
    assert lost_steps(path, resume_iteration=3) == {"lost_steps": 4, "last_lost": "T7"}
    assert lost_steps(path, resume_iteration=7) == {"lost_steps": None, "last_lost": None}
    JsonlSink(path, resume_iteration=3).on_stop(END)
    assert len(records(path)) == 3


def test_what_is_in_the_place_of_the_charts_is_named(tmp_path: Path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(UserError, match=r"tensorboard cannot be written \(File exists\): .* --no-tensorboard"):
        TensorBoardSink(tmp_path / "tensorboard")


def test_numbers_get_the_tags_that_people_expect() -> None:
    record = {
        "iteration": 3,
        "time": "2026-01-01",
        "loss": 2.5,
        "learning_rate": 1e-4,
        "mfu": None,
        "tokens_per_second": 12.0,
        "updated": True,
        "loss_by_source": {"a": 1.0, "b": None},
        "eval_count": 0.5,
        "imbalance_tokens": 1.1,
        "validation/loss": 2.0,
        "something_new": 7,
    }
    assert tagged(record) == {
        "train/loss": 2.5,
        "train/learning_rate": 1e-4,
        "perf/tokens_per_second": 12.0,
        "train/updated": True,
        "train/loss_by_source/a": 1.0,
        "validation/count": 0.5,
        "data/imbalance_tokens": 1.1,
        "validation/loss": 2.0,
        "other/something_new": 7,
    }


HERE = "tests.support.user_callbacks"


def test_callbacks_are_made_in_the_order_of_their_names() -> None:
    first, second = load([f"{HERE}:Diary", f"{HERE}:Broken"])
    assert (type(first), type(second)) == (Diary, Broken)


def test_a_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_module_of_mine.py").write_text(
        "from megavlm.metrics.callback import Callback\nclass Mine(Callback): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (mine,) = load(["a_module_of_mine:Mine"])
    assert type(mine).__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:X", "Python finds no module no_such_module: add its folder to PYTHONPATH"),
        (f"{HERE}:Diry", "has no Diry: did you mean Diary?"),
        (f"{HERE}:NoCallback", "makes a NoCallback: derive it from megavlm.metrics.callback.Callback"),
        (f"{HERE}:Unmakeable", "cannot be made: RuntimeError (user_callbacks.py, line "),
        ("a_bad_module:X", "cannot be imported: NameError (a_bad_module.py, line 2): name 'undefined' is not defined"),
        ("a_needy_module:X", "cannot be imported: ModuleNotFoundError (a_needy_module.py, line 1): No module named"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    (tmp_path / "a_bad_module.py").write_text("\nundefined\n")
    (tmp_path / "a_needy_module.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as error:
        load([name])
    assert str(error.value).startswith(f"--callback {name}")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_full_disk_ends_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Pages and charts are left out, which is said once; what comes after them is called."""

    class Full(Callback):
        def on_stop(self, stop: Stop) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    class After(Callback):
        def on_stop(self, stop: Stop) -> None:
            print("called")

    callbacks = Callbacks(Phases(), own=[Full(), After()])
    for _ in range(2):
        callbacks.on_stop(None)
    printed = capsys.readouterr()
    assert printed.out == "called\ncalled\n"
    (line,) = printed.err.splitlines()
    assert "Full cannot write (No space left on device): the run goes on" in line
