"""`megavlm` has the commands that it lists, and the scripts of the clone are the same programs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from megavlm.cli.main import COMMANDS, program

ROOT = Path(__file__).parents[3]


def ended(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["megavlm", *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this process goes on
    with pytest.raises(SystemExit) as end:
        program()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_every_command_is_a_program() -> None:
    for module, line in COMMANDS.values():
        assert callable(importlib.import_module(module).main)
        assert line.endswith((".", "…"))


def test_help_version_and_a_misspelt_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, "--help") == 0
    assert ended(monkeypatch) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in COMMANDS)
    assert ended(monkeypatch, "trian") == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_a_command_takes_its_words_and_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, "plan", "--model", "nonsense", "--gpus", "8") == 2
    assert "--model nonsense is not known" in capsys.readouterr().err
    assert ended(monkeypatch, "why", "--help") == 0
    assert capsys.readouterr().out.startswith("usage: megavlm why ")


def test_every_script_of_a_command_calls_it() -> None:
    scripts = [ROOT / "pretrain_vlm.py", *(ROOT / "tools").glob("*.py")]
    called = {path.stem: path.read_text(encoding="utf-8") for path in scripts if path.stem != "gpu_summary"}
    modules = {module for module, _ in COMMANDS.values() if module.startswith("megavlm.cli.")}
    assert {
        module for module in modules if any(f"from {module} import main" in text for text in called.values())
    } == modules
    assert all(text.count("\n") < 15 for text in called.values()), "programs are in the package"
