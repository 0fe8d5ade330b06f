from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megavlm.command_line.parsing import parse
from megavlm.metrics.callback import StepEnd, Stop
from megavlm.metrics.sinks import FILE, ExpertLoadsSink
from megavlm.programs import report
from megavlm.programs.charts import Line, chart
from megavlm.programs.report import differing, read_run
from megavlm.rules.load import to_yaml
from tests.support.html import told


def write_run(
    folder: Path, *, steps: int, lr: str = "1e-3", speed: float = 100.0, options: tuple[str, ...] = (), **more: object
) -> Path:
    folder.mkdir()
    config = parse(["--lr", lr, *options, "--run-dir", str(folder)])
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "environment.json").write_text(json.dumps({"device": "NVIDIA <b>H100</b>"}))
    start = {"time": "2026-01-01T00:00:00+00:00", "kind": "start", "iteration": 0, "world": 4, "attempt": 0, "rank": 0}
    bad = {"time": "2026-01-01T00:00:09+00:00", "kind": "skip", "iteration": 2, "reason": "nan in <script>", "rank": 0}
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (start, bad)))
    records = [
        {
            **{
                "iteration": n,
                "time": f"2026-01-01T00:{n // 60:02}:{n % 60:02}+00:00",
                "loss": 4.0 / n,
                "tokens": 1000,
            },
            **{"step_time_s": 1.0, "data_time_s": 0.25, "tokens_per_second": speed, "mfu": 0.4, "grad_norm": 1.0},
            **{"learning_rate": 1e-3, "packing_efficiency": 0.9, "skipped_samples": 1, "skipped_steps": 1},
            **{"peak_memory_gib": 10.0 + n / 10, "updated": True},
            **more,
        }
        for n in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_page_compares_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(
        tmp_path / "one",
        steps=40,
        **{"validation/loss": 1.5, "validation/perplexity": 4.5, "validation/trained_tokens": 9},
    )
    two = write_run(tmp_path / "two & more", steps=20, lr="5e-4", speed=180.0)
    out = tmp_path / "deep" / "report.html"
    assert report.main([str(one), str(two), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    page = out.read_text()
    text = told(page)
    for expected in ("one", "two & more", "4 × NVIDIA <b>H100</b>", "40.0%", "25.0%", "14.0 GiB", "12.0 GiB", "1 skip"):
        assert expected in text, expected
    # The last 20 losses, 4 / 21 to 4 / 40, have the mean 0.1362; 4 devices share 100 tokens/s.
    assert "one 4 × NVIDIA <b>H100</b> 40 0.1362 40k 40 s 100 25 40.0% 14.0 GiB 25.0% 40 samples, 1 step" in text
    assert "optimizer.lr 0.001 0.0005" in text
    assert "run.run_dir" not in text
    assert "validation/loss" in text
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=", page)
    # Loss over three axes, held-out loss over steps, …: each run has a line in each chart for which it has values.
    assert page.count('<polyline class="run"') == 2 * (3 + 4 + 2 + 2) + 1


def test_text_from_a_run_is_escaped_wherever_it_is_shown(tmp_path: Path) -> None:
    mark = "<script>{}"
    runs = [
        write_run(
            tmp_path / mark.format(name), steps=2, options=("--tokenizer", mark.format(f"tokenizer of {name}")), **more
        )
        for name, more in {"one": {"validation/<script>loss": 1.0}, "two": {}}.items()
    ]
    with (runs[0] / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": mark.format("kind")}))
    out = tmp_path / "report.html"
    assert report.main([*map(str, runs), "--out", str(out)]) == 0
    page = out.read_text()
    assert "<script" not in page
    text = told(page)
    for name in ("one", "two", "kind"):
        assert mark.format(name) in text, name
    assert "data.tokenizer <script>tokenizer of one <script>tokenizer of two" in text
    assert "validation/<script>loss" in text


def test_one_run_shows_what_differs_from_the_defaults(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "one", steps=3, lr="7e-4"))
    assert differing([run]) == {"optimizer.lr": [7e-4]}
    assert differing([run, run]) == {}


def test_a_damaged_run_is_told_with_what_can_be_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=3)
    (run / "config.yaml").write_text("train: {no_such_option: 1}")
    (run / "environment.json").write_text("[")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "loss": NaN, "tokens": 1e300, "mfu": "x", "step_time_s": null, ')
        file.write(f'"grad_norm": {10**400}, "validation/loss": NaN}}\n{{"iter')
    read = read_run(run)
    assert read.settings == {}
    assert read.values("loss") == [4.0, 2.0, 4 / 3]
    assert read.axes["tokens"] == [1000, 2000, 3000, 3000]
    assert read.axes["hours"] == [1 / 3600, 2 / 3600, 3 / 3600, 3 / 3600]
    assert read.validations == []
    out = tmp_path / "report.html"
    assert report.main([str(run), "--out", str(out)]) == 0
    assert "No config.yaml can be read." in told(out.read_text())


def write_loads(folder: Path, iterations: range, *, train_iters: int, resume: int = 0) -> list[dict[str, object]]:
    sink = ExpertLoadsSink(folder, train_iters=train_iters, resume_iteration=resume)
    for number in iterations:
        sink.on_step_end(StepEnd({"iteration": number}, expert_loads={1: (0.0, 6.0, 3.0), 4: (0.0, 0.0, 0.0)}))
    sink.on_stop(Stop(0, "finished"))
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_loads_are_written_over_their_mean_and_not_at_every_step_of_a_long_run(tmp_path: Path) -> None:
    lines = write_loads(tmp_path, range(1, 11), train_iters=1000)
    assert lines == [{"iteration": n, "layers.1": [0.0, 2.0, 1.0], "layers.4": [0.0, 0.0, 0.0]} for n in (5, 10)]
    lines = write_loads(tmp_path, range(6, 16), train_iters=1000, resume=5)
    assert [line["iteration"] for line in lines] == [5, 10, 15]


@pytest.mark.parametrize("name", ["none", "file"])
def test_what_is_no_run_is_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert report.main([str(tmp_path / name)]) == 2
    assert "name the folder of a run" in capsys.readouterr().err


def test_a_chart_places_the_extremes_at_its_edges() -> None:
    drawn = chart("loss", [Line("a", "red", [(10, 2.0), (20, 4.0)])], across="steps")
    assert 'points="0.0,1000.0 1000.0,0.0"' in drawn
    assert "2" in told(drawn)
    assert not chart("loss", [Line("a", "red", [])], across="steps")
    assert 'points="0.0,500.0' not in chart("flat", [Line("a", "red", [(1, 3.0), (2, 3.0)])], across="steps")
