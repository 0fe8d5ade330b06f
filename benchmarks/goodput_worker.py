"""Train as `pretrain_vlm.py` does; a batch gets a NaN among its pixels whenever a file RUN_DIR/spoil appears."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

SPOIL = "spoil"


def main(argv: list[str]) -> int:
    """Return the exit status of the program."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megavlm import backend
    from megavlm.programs import train

    marker = Path(argv[argv.index("--run-dir") + 1]) / SPOIL
    activate = backend.activate

    def activate_and_watch(**options: Any) -> Any:
        chosen = activate(**options)
        if os.environ.get("RANK") == "0":
            _watch(marker)
        return chosen

    backend.activate = activate_and_watch
    return train.main(argv)


def _watch(marker: Path) -> None:
    """Let the data loader spoil its next batch with images once the marker is there, and remove the marker then."""
    from megavlm.data.loader import DataLoader

    next_step = DataLoader.next_step

    def spoilt(loader: DataLoader) -> Any:
        step = next_step(loader)
        if marker.exists():
            held = [batch.images for batch in step.batches if batch.images is not None and len(batch.images.patches)]
            if held:
                held[0].patches[0, 0] = float("nan")
                marker.unlink()
        return step

    DataLoader.next_step = spoilt  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as pretrain_vlm.py does
