"""The first run of README.md, command by command as it is printed there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.examples import environment

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_session_ends_with_the_answer_that_readme_says(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## First run on your own data")[2]
    session = re.findall(r"^```bash\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)[0]
    (answer,) = re.findall(r"The last line prints `(.+?)`", section)
    for name in ("pretrain_vlm.py", "megavlm", "tools", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()  # the tests' own environment is the one that is used
    shell = ["bash", "-ec", session]
    run = subprocess.run(shell, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == answer
