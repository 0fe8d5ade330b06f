"""Return the names under which commands of this program are shown to the user and started; run other programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def started_as(command: str) -> str:
    """Return the name of a running command for messages: the clone's pretrain_vlm.py, or `megavlm COMMAND`."""
    script = Path(sys.argv[0]).name
    return script if script == "pretrain_vlm.py" else f"megavlm {command}"


def program(command: str) -> str:
    """Return the command line of a command, such as `megavlm plan`, or `python -m megavlm plan` if started that way."""
    return f"{'python -m ' if sys.argv[0].startswith('python -m megavlm') else ''}megavlm {command}"


def output_of(*command: str) -> str | None:
    """Return the stdout of a command; None if it is not installed, fails, or takes over 30 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
