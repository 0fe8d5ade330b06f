"""The file of loads that a run writes, and the heat map of it."""

from __future__ import annotations

import json
from pathlib import Path

from megavlm.metrics.callback import StepEnd, Stop
from megavlm.metrics.expert_loads import FILE, ExpertLoadsSink
from megavlm.programs.preview.expert_loads import heat_map, mean_loads
from megavlm.programs.preview.report import page
from megavlm.programs.preview.run_data import read_run


def write(folder: Path, iterations: range, *, train_iters: int, resume: int = 0) -> list[dict[str, object]]:
    sink = ExpertLoadsSink(folder, train_iters=train_iters, resume_iteration=resume)
    for number in iterations:
        sink.on_step_end(StepEnd({"iteration": number}, expert_loads={1: (0.0, 6.0, 3.0), 4: (0.0, 0.0, 0.0)}))
    sink.on_stop(Stop(0, "finished"))
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_loads_are_written_over_their_mean_and_not_at_every_step_of_a_long_run(tmp_path: Path) -> None:
    lines = write(tmp_path, range(1, 11), train_iters=1000)
    assert lines == [{"iteration": n, "layers.1": [0.0, 2.0, 1.0], "layers.4": [0.0, 0.0, 0.0]} for n in (5, 10)]
    lines = write(tmp_path, range(6, 16), train_iters=1000, resume=5)
    assert [line["iteration"] for line in lines] == [5, 10, 15]


def test_a_dense_model_writes_nothing(tmp_path: Path) -> None:
    sink = ExpertLoadsSink(tmp_path, train_iters=1)
    sink.on_step_end(StepEnd({"iteration": 1}))
    assert (tmp_path / FILE).read_text() == ""


def test_the_map_has_a_cell_for_each_expert() -> None:
    lines = [{"iteration": 1, "layers.1": [2.0, 0.0]}, {"iteration": 2, "layers.1": [1.0, 1.0], "layers.2": "damage"}]
    loads = mean_loads(lines)
    assert loads == {"layers.1": [1.5, 0.5]}
    drawn = heat_map(loads)
    assert drawn.count("<i ") == 2
    assert "layers.1, expert 0: 1.50 × the mean" in drawn
    assert "fullest 1.50 × the mean, emptiest 0.50 ×" in drawn


def test_a_report_shows_the_experts_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "loss": 1.0, "tokens": 3}) + "\n")
    write(tmp_path, range(1, 2), train_iters=1)
    assert "layers.1, expert 1: 2.00 × the mean" in page([read_run(tmp_path)])
    (tmp_path / FILE).unlink()
    assert "Experts of" not in page([read_run(tmp_path)])
