"""A process whose output is lost goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_locale_without_a_character_stops_nothing() -> None:
    code = "from megavlm.programs.main import run\nrun(lambda argv: print('2 × 3 …'))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"2 \\xd7 3 \\u2026\n", b"")


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
