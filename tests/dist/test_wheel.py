"""The wheel, as `pip install` unpacks it, outside the clone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel was installed to. It is built from a copy: setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "megavlm", source / "megavlm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True)
    return site


def megavlm(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command in a folder that is not the clone."""
    elsewhere = site.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(site / "bin/megavlm"), *words]
    return subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_works_outside_the_clone(site: Path) -> None:
    assert "train" in megavlm(site, "--help").stdout
    planned = megavlm(site, "train", "--tp", "2", "--world-size", "8", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "TP 2" in planned.stdout
    assert "8 processes" in planned.stdout
    plan = megavlm(site, "plan", "--model", "qwen2_5_vl_3b", "--gpus", "1", "--gbs", "4", "--out", "best.yaml")
    assert plan.returncode == 0, plan.stderr
    assert megavlm(site, "train", "--config", "best.yaml", "--dry-run").returncode == 0
    assert megavlm(site, "convert", "--help").returncode == 0
    local = megavlm(site, "launch", "local", "--gpus-per-node", "2", "--dry-run", "--", "--tp", "2")
    assert local.returncode == 0, local.stderr
    assert "megavlm train --tp 2" in local.stdout.replace("'", "")


@pytest.mark.slow
def test_it_trains_and_knows_its_requirements(site: Path) -> None:
    trained = megavlm(site, "train", "--train-iters", "2", "--run-dir", "run", "--no-save")
    assert trained.returncode == 0, trained.stderr
    assert len((site.parent / "elsewhere/run/metrics.jsonl").read_text().splitlines()) == 2
    told = json.loads(megavlm(site, "doctor", "--no-measure", "--json").stdout)
    assert told["facts"]["packages"]["torch"]
