"""The image's file, as far as a machine without Docker can check it."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib

import pytest

from tests.support.cloud import PYTHON
from tests.support.forked import ROOT

DOCKERFILE = ROOT / "launch/docker/Dockerfile"
HADOLINT = PYTHON.with_name("hadolint")


def pip_lines() -> list[list[str]]:
    """The words of each `pip install` in it, continued lines joined."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    found = re.findall(r"pip install ((?:'[^']*'|[^&|;\n])*)", text)
    return [shlex.split(line) for line in found]


def test_versions_are_those_that_go_together():
    """Each pip line is constrained by requirements/gpu.txt, and repeats its versions where it names its packages."""
    constraints = dict(
        line.split("==") for line in (ROOT / "requirements/gpu.txt").read_text().splitlines() if "==" in line
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = pip_lines()
    assert len(lines) == 3
    for words in lines:
        assert words[:2] == ["-c", "requirements/gpu.txt"]
        for word in words[2:]:
            name, _, version = re.sub(r"\[.*\]", "", word).partition("==")
            assert constraints.get(name, version) == version or word.startswith("."), word
            if own := re.fullmatch(r"\.\[(.*)\]", word):
                assert set(own[1].split(",")) <= set(extras)
    # megavlm and Transformer Engine are built against the torch that is there.
    assert all("--no-build-isolation" in words for words in lines[1:])


@pytest.mark.skipif(not HADOLINT.exists(), reason=f"no {HADOLINT}: `make cloud-tools` installs it")
def test_the_linter_has_nothing_against_it():
    done = subprocess.run([str(HADOLINT), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
