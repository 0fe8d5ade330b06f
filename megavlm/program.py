"""Say how this program was started, and what starts another, in the words that a user types."""

from __future__ import annotations

import sys
from pathlib import Path

# Scripts of a clone whose names are not those of their commands.
_SCRIPTS = {"train": "pretrain_vlm.py", "prepare": "tools/prepare_data.py", "preview": "tools/preview_data.py"}


def started_as(command: str) -> str:
    """Return the name under which a running command speaks: that of the clone's script, or `megavlm COMMAND`."""
    script = Path(_SCRIPTS.get(command, f"tools/{command}.py")).name
    return script if Path(sys.argv[0]).name == script else f"megavlm {command}"


def program(command: str) -> str:
    """Return what starts a command: `megavlm plan`, say; `python -m megavlm plan` where the running one began so."""
    return f"{'python -m ' if sys.argv[0].startswith('python -m megavlm') else ''}megavlm {command}"
