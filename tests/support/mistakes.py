"""The table of mistakes, `tests/unit/config/mistakes.txt`."""

from __future__ import annotations

from pathlib import Path


def rows_by_section() -> dict[str, list[list[str]]]:
    """Return the rows of the table by section."""
    path = Path(__file__).parents[1] / "unit/config/mistakes.txt"
    found: dict[str, list[list[str]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            rows = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            rows.append(line.replace("{file}", __file__).split(" | "))
    return found
