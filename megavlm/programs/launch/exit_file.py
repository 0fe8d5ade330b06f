"""Tell the script of a job how the run ended, since torchrun itself ends with 1 whenever a rank does not return 0; and
torchrun why.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

VARIABLE = "MEGAVLM_EXIT_FILE"  # names the file, on storage that all nodes share


def note_exit(status: int, environment: Mapping[str, str]) -> None:
    """Write this rank's exit status to the file that the environment names, unless another rank was first."""
    if path := environment.get(VARIABLE):
        with suppress(OSError), open(path, "x") as file:
            file.write(str(status))


def note_cause(line: str, environment: Mapping[str, str]) -> None:
    """Write why this rank fails to the file from which torchrun takes the last lines that it prints, if it started this
    process. The rank that failed first gives the cause.
    """
    if path := environment.get("TORCHELASTIC_ERROR_FILE"):
        told = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": told}, file)


def read_exit(path: Path) -> int | None:
    """Return the exit status of the first rank that ended by itself; None if none did."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
