"""`megavlm` has the commands that it lists, each with its name in messages."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megavlm.command_line.commands import as_typed
from megavlm.errors import UserError
from megavlm.program import program as what_starts
from megavlm.program import started_as
from megavlm.programs.main import COMMANDS, program
from megavlm.programs.train import allow_open_files

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
    assert ended(monkeypatch, "report", "RUN", "--tp", "2") == 2
    assert "unknown option --tp, which megavlm train alone has: leave it out" in capsys.readouterr().err
    assert ended(monkeypatch, "why", "--help") == 0
    assert capsys.readouterr().out.startswith("usage: megavlm why ")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("train", "doctor")])
def test_a_mistake_in_a_command_is_one_line_with_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--nope"]):
        assert importlib.import_module(COMMANDS[name][0]).main(argv) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"megavlm {name}: ")
        assert "preview" in line or "--help" in line or "come after --" in line


@pytest.mark.parametrize(
    ("typed", "command", "speaks", "other"),
    [
        ("megavlm plan", "plan", "megavlm plan", "megavlm doctor"),
        ("python -m megavlm plan", "plan", "megavlm plan", "python -m megavlm doctor"),
        (str(ROOT / "pretrain_vlm.py"), "train", "pretrain_vlm.py", "megavlm doctor"),
        ("/usr/lib/pytest/__main__.py", "train", "megavlm train", "megavlm doctor"),
    ],
)
def test_a_program_is_named_as_it_was_typed(
    monkeypatch: pytest.MonkeyPatch, typed: str, command: str, speaks: str, other: str
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [typed])
    assert started_as(command) == speaks
    assert what_starts("doctor") == other


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--tp 2 --pp=3", "--tp 2 × --pp 3, --sequence-parallel, --tensor-model-parallel-size-x"),
        (
            "--tensor-model-parallel-size 2 --sp",
            "--tensor-model-parallel-size 2 × --pipeline-model-parallel-size 3, --sp",
        ),
    ],
)
def test_an_option_is_named_as_it_was_typed(typed: str, says: str) -> None:
    message = (
        "--tensor-model-parallel-size 2 × --pipeline-model-parallel-size 3, --sequence-parallel, "
        "--tensor-model-parallel-size-x"
    )
    assert as_typed(message, typed.split()).startswith(says)
    assert as_typed("leave --no-sequence-parallel out", ["--no-sp"]) == "leave --no-sp out"


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    """`python -m` has it first on sys.path."""
    for name in ("torch", "numpy", "yaml", "pickle", "sitecustomize", "megavlm_extension"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    for words in (
        ("megavlm", "channels", "none"),
        ("megavlm.programs.launch.node", "--help"),
    ):
        done = subprocess.run(
            [sys.executable, "-u", "-m", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, 2), done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_a_program_that_uses_the_package_keeps_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import megavlm, beside; print(beside.HERE)")
    (tmp_path / "beside.py").write_text("HERE = 'found'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "mine"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "found\n", done.stderr


@pytest.mark.parametrize("most", [24, 900])
def test_few_open_files_are_raised_or_one_line(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda which: (24, most))
    monkeypatch.setattr("resource.setrlimit", lambda which, limits: raised.append(limits))
    if most == 24:
        with pytest.raises(UserError, match=r"\(ulimit -n 24\) is too low: raise it"):
            allow_open_files()
    else:
        allow_open_files()
    assert raised == ([] if most == 24 else [(900, 900)])


PROGRAM = """
import sys
from megavlm.programs.main import survive_lost_output
survive_lost_output()
print("first", flush=True)
sys.stdin.read()
for _ in range(3):
    print("x" * 100_000, flush=True)
    print("y", file=sys.stderr, flush=True)
print("last", flush=True)
sys.exit(7)
"""


def start(**streams: object) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[3])
    code = "import signal; signal.signal(signal.SIGPIPE, signal.SIG_IGN)" + PROGRAM
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment, **streams)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [("print('2 × 3 …')", 0, b"2 \\xd7 3 \\u2026\n"), ("exec('raise KeyboardInterrupt')", -signal.SIGINT, b"")],
)
def test_a_locale_without_a_character_and_ctrl_c_end_without_a_traceback(command: str, status: int, said: bytes):
    code = f"from megavlm.programs.main import run\nrun(lambda argv: {command})"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, said, b"")


def test_what_is_printed_arrives(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as file:
        process = start(stdout=file, stderr=file)
        process.communicate()
    assert process.returncode == 7
    assert (tmp_path / "output").read_text().split() == ["first", *["x" * 100_000, "y"] * 3, "last"]


@pytest.mark.parametrize("lost", ["reader", "disk"])
def test_lost_output_does_not_end_the_process(lost: str) -> None:
    if lost == "disk":
        with open("/dev/full", "wb") as full:
            process = start(stdout=full, stderr=full)
    else:
        read, written = os.pipe()
        process = start(stdout=written, stderr=written)
        os.close(written)
        assert os.read(read, 6) == b"first\n"
        os.close(read)
    process.communicate()
    assert process.returncode == 7
