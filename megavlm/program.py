"""Say how this program was started, and what starts another, in the words that a user types."""

from __future__ import annotations

import sys
from pathlib import Path

# Scripts of a clone whose names are not those of their commands.
_SCRIPTS = {"train": "pretrain_vlm.py", "prepare": "tools/prepare_data.py", "preview": "tools/preview_data.py"}


def started_as(command: str) -> str:
    """Return the name under which a running command speaks: that of the clone's script, or `megavlm COMMAND`."""
    script = Path(_script(command)).name
    return script if Path(sys.argv[0]).name == script else f"megavlm {command}"


def program(command: str) -> str:
    """Return what starts a command, in the way that the running one was started: `python tools/plan.py`, say."""
    if sys.argv[0].startswith("python -m megavlm"):
        return f"python -m megavlm {command}"
    if sys.argv[0].endswith(".py"):
        folder = Path(sys.argv[0]).parent
        for clone in (folder, folder.parent):
            if (clone / "pretrain_vlm.py").is_file():
                return f"python {clone / _script(command)}"
    return f"megavlm {command}"


def _script(command: str) -> str:
    return _SCRIPTS.get(command, f"tools/{command}.py")
