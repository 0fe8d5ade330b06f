"""Let ranks that the layout or the global batch cannot use wait for the end of the run, ready for its next start."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megavlm.errors import Stopped
from megavlm.resilience.status import read_status

_PAUSE = 1.0  # seconds between two looks


def wait_as_spare(run_dir: Path, before: dict[str, Any]) -> None:
    """Return when the run has finished. Raises Stopped if it was stopped, SystemExit if it failed.

    `before` is the status when this process started, of an earlier run or attempt. A run that is killed says nothing:
    torchrun then ends this process, too.
    """
    while True:
        status = read_status(run_dir)
        if status != before:
            match status.get("state"):
                case "finished":
                    return
                case "stopped":
                    raise Stopped(str(status.get("reason")))
                case "failed":
                    raise SystemExit(1)
        time.sleep(_PAUSE)
