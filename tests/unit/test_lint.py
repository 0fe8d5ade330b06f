"""What `make lint` looks at."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def paths_listed_by(*command: str) -> set[Path]:
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {ROOT / line for line in listed.splitlines()}


@pytest.mark.skipif(not shutil.which("git") or not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_ruff_reads_every_python_file_of_the_repository() -> None:
    """ruff's default excludes skip every folder named `dist`, and tell nobody."""
    tracked = {path for path in paths_listed_by("git", "ls-files", "*.py") if path.exists()}
    assert len(tracked) > 100
    assert tracked - paths_listed_by(sys.executable, "-m", "ruff", "check", "--show-files", ".") == set()
