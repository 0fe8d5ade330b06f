"""Part 5 of `tools/gpu_check.sh`, with stand-ins of the interpreter and of MPS: when it runs, in what environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools/gpu_check.sh"

# It knows of the devices and of NCCL what $FOUND says, writes down how pytest is started, and prints the table.
INTERPRETER = f"""#!/bin/sh
case "$1 $2" in
    "-c import xdist") exit 1 ;;
    -c*) echo "$FOUND" ;;
    "-m pytest") env >"$SEEN/environment"; echo "$@" >"$SEEN/words"; exit "$STATUS" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
MPS = """#!/bin/sh
if [ "$1" = -d ]; then echo "started, devices ${CUDA_VISIBLE_DEVICES-all}" >>"$SEEN/mps"; else cat >>"$SEEN/mps"; fi
"""


class Check:
    """The script's part 5 in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, folder / "seen"
        self.seen.mkdir()
        for name, text in (("python", INTERPRETER), ("nvidia-cuda-mps-control", MPS)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "temporary").mkdir()

    def run(self, *argv: str, found: str = "", status: int = 0) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "NCCL_"))}
        env = kept | {
            "PYTHON": str(self.folder / "python"),
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "TMPDIR": str(self.folder / "temporary"),
            "FOUND": found,
            "SEEN": str(self.seen),
            "STATUS": str(status),
        }
        command = [str(SCRIPT), "--part", "5", "--out", str(self.folder / "out"), *argv]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    def environment(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in (self.seen / "environment").read_text().splitlines() if "=" in line)


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("", "needs a CUDA device"),
        ("0 23102", "needs a CUDA device"),
        ("1 22809", "this is 22809: name a newer one with --nccl"),
        ("3 22809", "this is 22809: name a newer one with --nccl"),
    ],
)
def test_where_ranks_cannot_share_a_device_one_line_says_why(check: Check, found: str, reason: str) -> None:
    ended = check.run(found=found)
    assert ended.returncode == 0
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("== "))
    assert line.startswith("== layouts: skipped: ")
    assert reason in line
    assert not list(check.seen.iterdir()), "neither tests nor MPS"


def test_ranks_share_the_first_device_under_mps_that_ends_with_the_check(check: Check) -> None:
    (nccl := check.folder / "libnccl.so.2").touch()
    ended = check.run("--nccl", str(nccl), found="1 23102")
    assert ended.returncode == 0, ended.stderr
    found = check.environment()
    assert found["LD_PRELOAD"] == str(nccl)
    assert found["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert found["CUDA_VISIBLE_DEVICES"] == "0"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in found
    assert found["CUDA_MPS_PIPE_DIRECTORY"].startswith(str(check.folder / "temporary"))
    assert (check.seen / "mps").read_text() == "started, devices all\nquit\n"
    assert not list((check.folder / "temporary").iterdir())
    assert "-m not slow and not gpu tests/dist/test_parity.py" in (check.seen / "words").read_text()


def test_ranks_with_a_device_each_need_neither(check: Check) -> None:
    assert check.run(found="4 22809").returncode == 0
    assert not {name for name in check.environment() if name.startswith(("NCCL_", "CUDA_"))}
    assert not (check.seen / "mps").exists()
