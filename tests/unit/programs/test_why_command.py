"""`megavlm why` on the files of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megavlm.programs.why import main


def test_it_says_what_takes_time_and_which_option_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    steps = [{"iteration": i, "step_time_s": 1.0, "data_time_s": 0.5, "updated": True} for i in range(1, 11)]
    lines = [json.dumps(step) for step in steps]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, "[" * 100_000, "torn {"]))
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "50.0%  the ranks wait for data" in said
    assert "--num-workers" in said


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
