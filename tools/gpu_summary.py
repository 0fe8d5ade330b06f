"""The table that `gpu_check.sh` prints last: `python tools/gpu_summary.py FOLDER` of what its parts wrote there."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMED_OUT = (124, 137)


@dataclass(frozen=True)
class Row:
    what: str
    result: str  # ok, FAILED, missed, skipped, or empty for a figure that nothing is asked of
    figure: str = ""
    target: str = ""


def rows_of(folder: Path) -> list[Row]:
    """All rows of one check."""
    return [*_parts(folder), *_findings(folder), *_tests(folder), *_figures(folder)]


def table(rows: Sequence[Row]) -> str:
    lines = [("what", "result", "figure", "target"), *((r.what, r.result, r.figure, r.target) for r in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _parts(folder: Path) -> Iterator[Row]:
    for line in (folder / "parts.tsv").read_text().splitlines():
        name, status, seconds, limit = line.split("\t")
        failed = "FAILED: out of time" if int(status) in _TIMED_OUT else f"FAILED: status {status}"
        yield Row(name, "ok" if status == "0" else failed, f"{seconds} s", f"< {limit} s")


def _findings(folder: Path) -> Iterator[Row]:
    file = folder / "doctor.json"
    if not file.exists() or not file.read_text().strip():
        return
    found = json.loads(file.read_text())
    names = Counter(device["name"] for device in found["facts"]["devices"])
    yield Row("device", "", ", ".join(f"{count} × {name}" for name, count in names.items()) or "none")
    for each in found["findings"]:
        yield Row(f"doctor: {each['what']}", each["level"], "", each["remedy"])


def _tests(folder: Path) -> Iterator[Row]:
    """One row per test; those skipped for one reason share a row."""
    file = folder / "tests.xml"
    if not file.exists():
        return
    skipped: Counter[str] = Counter()
    for case in ElementTree.parse(file).iter("testcase"):
        name, seconds = f"test: {case.get('name')}", f"{float(case.get('time') or 0):.1f} s"
        skip = case.find("skipped")
        if skip is not None:
            skipped[(skip.get("message") or "no reason given").splitlines()[0]] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            yield Row(name, "FAILED", seconds)
        else:
            yield Row(name, "ok", seconds)
    for reason, count in skipped.items():
        yield Row(f"{count} test(s)", "skipped", reason)


def _figures(folder: Path) -> Iterator[Row]:
    file = folder / "benchmark.json"
    if not file.exists():
        return
    results = {None: "", True: "ok", False: "missed"}
    for row in json.loads(file.read_text())["rows"]:
        yield Row(row["what"], results[row["met"]], row["figure"], row["target"])


def main(argv: Sequence[str]) -> int:
    rows = rows_of(Path(argv[0]))
    print("\n" + table(rows))
    return int(any(row.result.startswith("FAILED") for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
