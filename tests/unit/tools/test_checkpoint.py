"""The commands of `megavlm checkpoint`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megavlm.checkpoint.manifest import SUMMARY
from megavlm.programs.checkpoint import main
from tests.support.manifests import committed

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints 10 to 40, of which 30 has a flipped bit and 40 lacks a file."""
    root = tmp_path / "run/checkpoints"
    for iteration in (10, 20, 30, 40):
        summary = json.dumps({"iteration": iteration})
        committed(root, iteration, {"__0_0.distcp": bytes([iteration]) * 1000, "common.pt": b"x", SUMMARY: summary})
    (root / "iter_0000030/__0_0.distcp").write_bytes(b"\x00" + bytes([30]) * 999)
    (root / "iter_0000040/common.pt").unlink()
    return tmp_path / "run"


def test_verify_names_the_damaged_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    found = [line.split(": ", 1)[1].split(":")[0] for line in lines]
    assert found == ["whole", "whole", "__0_0.distcp is damaged", "common.pt is missing"]
    assert main(["verify", str(run / "checkpoints/iter_0000010")]) == 0


def test_list_and_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1] for line in lines] == ["whole", "whole", "whole", "common.pt is missing"]
    assert main(["show", str(run / "checkpoints/iter_0000020")]) == 0
    assert json.loads(capsys.readouterr().out)["iteration"] == 20


def test_it_needs_no_torch(run: Path) -> None:
    """Nor does the account of a job's attempts, for which all nodes wait."""
    code = (
        "import runpy, sys; sys.modules['torch'] = None; import megavlm.programs.launch.attempt; "
        "runpy.run_module('megavlm', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "checkpoint", "list", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("iter_") == 4


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path / "nowhere")]) == 2
    assert "holds no checkpoints" in capsys.readouterr().err
