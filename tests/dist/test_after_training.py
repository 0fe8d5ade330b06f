"""The first run of README.md, the commands of docs/after-training.md after it and the hour of docs/first-hour.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.examples import environment
from tests.support.training import metrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/after-training.md").read_text(encoding="utf-8")
LMMS = ROOT / "build/lmms/bin/python"
pytestmark = pytest.mark.slow


def blocks(text: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def run(session: str, folder: Path, python: Path = Path(sys.executable)) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["bash", "-ec", session],
        cwd=folder,
        env=environment(folder, python) | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def link(folder: Path) -> None:
    for name in ("pretrain_vlm.py", "megavlm", "examples"):
        (folder / name).symlink_to(ROOT / name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which README's first run has been trained and exported; it ends with the answer that README says."""
    folder = tmp_path_factory.mktemp("first")
    link(folder)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()  # the tests' own environment is the one that is used
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## First run on your own data")[2]
    (answer,) = re.findall(r"The last line prints `(.+?)`", readme)
    assert run(blocks(readme)[0], folder).stdout.splitlines()[-1] == answer
    return folder


def test_chat_and_evaluation(trained: Path) -> None:
    printed = run("\n".join(block for block in blocks(PAGE) if "lmms_eval" not in block), trained).stdout
    assert "This is a red circle." in printed.splitlines()
    for folder in (trained / "runs/first/evaluations/iter_0000120", trained / "scores/first"):
        tasks = json.loads((folder / "results.json").read_text())["tasks"]
        assert [each["answer"] for each in tasks["questions"]["answers"]] == [
            "This is a red circle.",
            "This is a blue square.",
            "This is a green triangle.",
        ]
        assert (folder / "failures.html").read_text().count("<article>") == 1


@pytest.mark.skipif(not LMMS.exists(), reason="lmms-eval is not installed: make lmms-tools")
def test_an_export_runs_in_lmms_eval(trained: Path) -> None:
    """The same answers as those of `megavlm evaluate`: two of three equal their reference."""
    (session,) = [block for block in blocks(PAGE) if "lmms_eval" in block]
    told = run(session, trained, LMMS)
    (results,) = (trained / "scores/lmms-eval").rglob("*_results.json")
    assert json.loads(results.read_text())["results"]["first_run"]["exact_match,none"] == pytest.approx(2 / 3), told


def test_the_hour_in_miniature_ends_with_a_model_that_sees(tmp_path: Path) -> None:
    section = (ROOT / "docs/first-hour.md").read_text(encoding="utf-8").partition("## The same in miniature")[2]
    link(tmp_path)
    done = run(blocks(section)[0], tmp_path)
    records = metrics(tmp_path / "runs/hour")
    measured = [record["validation/loss"] for record in records if "validation/loss" in record]
    assert measured[-1] < measured[0]
    (results,) = (tmp_path / "runs/hour/evaluations").rglob("results.json")
    (score,) = json.loads(results.read_text())["tasks"]["questions"]["scores"]
    assert score["questions"] == 30
    assert score["mean"] > 3 / 12, "three times what guessing one of twelve answers gives"
    assert re.match(r"This is a \w+ \w+\.$", done.stdout.splitlines()[-1])
