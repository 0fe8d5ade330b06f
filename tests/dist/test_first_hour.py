"""docs/first-hour.md: the hour in miniature, command by command as it is printed there."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.examples import environment
from tests.support.training import metrics

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_hour_in_miniature_ends_with_a_model_that_sees(tmp_path: Path) -> None:
    section = (ROOT / "docs/first-hour.md").read_text(encoding="utf-8").partition("## The same in miniature")[2]
    (session,) = re.findall(r"^```bash\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    for name in ("pretrain_vlm.py", "megavlm", "tools", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    shell = ["bash", "-ec", session]
    run = subprocess.run(shell, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    records = metrics(tmp_path / "runs/hour")
    measured = [record["validation/loss"] for record in records if "validation/loss" in record]
    assert measured[-1] < measured[0]
    (results,) = (tmp_path / "runs/hour/evaluations").rglob("results.json")
    (score,) = json.loads(results.read_text())["tasks"]["questions"]["scores"]
    assert score["questions"] == 30
    assert score["mean"] > 3 / 12, "three times what guessing one of twelve answers gives"
    assert re.match(r"This is a \w+ \w+\.$", run.stdout.splitlines()[-1])
