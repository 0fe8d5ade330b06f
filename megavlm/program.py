"""Return the names under which commands of this program are shown to the user and started."""

from __future__ import annotations

import sys
from pathlib import Path

# Scripts of a clone whose names are not those of their commands.
_SCRIPTS = {"train": "pretrain_vlm.py", "prepare": "tools/prepare_data.py", "preview": "tools/preview_data.py"}


def started_as(command: str) -> str:
    """Return the name of a running command for messages: the clone's script, or `megavlm COMMAND`."""
    script = Path(_SCRIPTS.get(command, f"tools/{command}.py")).name
    return script if Path(sys.argv[0]).name == script else f"megavlm {command}"


def program(command: str) -> str:
    """Return the command line of a command, such as `megavlm plan`, or `python -m megavlm plan` if started that way."""
    return f"{'python -m ' if sys.argv[0].startswith('python -m megavlm') else ''}megavlm {command}"
