"""The page of normal differences is that of its records, and a fault is no normal difference."""

from __future__ import annotations

import importlib
import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megavlm.backend import activate


@pytest.fixture(scope="module")
def normal() -> Any:
    """Return the benchmark's module, imported once the backend is active: it imports megatron-core."""
    activate()
    return importlib.import_module("normal")


def test_the_page_is_made_of_the_records(normal: Any) -> None:
    text = normal.DOCUMENT.read_text(encoding="utf-8")
    assert normal.documented(text) == text, "renew it: python benchmarks/normal.py --write"


def test_a_wrong_epsilon_is_far_above_what_bf16_changes(normal: Any, tmp_path: Path) -> None:
    """The same weights without the fault are far below it."""
    tiny = normal.Tiny.of("llava", tmp_path, draws=2)
    theirs, rounded = (normal.of_transformers(tiny, bf16) for bf16 in (False, True))
    wrong = replace(tiny, folder=shutil.copytree(tiny.folder, tmp_path / "wrong"))
    settings = json.loads((wrong.folder / "config.json").read_text())
    settings["text_config"]["rms_norm_eps"] = 0.1
    (wrong.folder / "config.json").write_text(json.dumps(settings))
    unit = normal.apart(rounded, theirs)
    with closing(normal.Pools()) as pools:
        ours, faulty = (
            normal.apart(normal.of_megavlm(pools, each, normal.CASES[normal.ONE]), theirs) for each in (tiny, wrong)
        )
    for name in normal.FIGURES:
        assert ours[name] < unit[name] / 100, (name, ours, unit)
        assert faulty[name] > unit[name] * 3, (name, faulty, unit)
