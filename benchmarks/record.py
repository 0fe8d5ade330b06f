"""Append records of measurements, with date, commit, versions, processor and load average."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def circumstances() -> dict[str, Any]:
    """Return date, commit, versions, processor and load average; call it before measuring."""

    def git(*words: str) -> str:
        try:
            return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:  # a machine without git
            return ""

    models = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "megatron-core", "transformers")},
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
    }


def append(name: str, record: Mapping[str, Any]) -> None:
    """Add a line to `benchmarks/records/NAME.jsonl`."""
    path = HERE / "records" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as records:
        records.write(json.dumps({**record, "load_average_after": os.getloadavg()[0]}, ensure_ascii=False) + "\n")


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""
