"""Write skipped samples and their reasons to RUN_DIR/skipped, one file per rank that reads data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from megavlm.data.batch_sampler import Skipped


class SkippedLog:
    """Appends one JSON line per skipped sample to a file, which the first one creates; no path: writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, iteration: int, skipped: Iterable[Skipped]) -> None:
        for skip in skipped:
            if self._path is None:
                return
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
            line = {"iteration": iteration, **vars(skip), "reason": str(skip.reason)}
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
