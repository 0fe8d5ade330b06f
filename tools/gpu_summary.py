"""Print the results that `gpu_check.sh` wrote as one table: `python tools/gpu_summary.py FOLDER`."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TIMED_OUT = ("124", "137")
_REASON_UNKNOWN = "before the tests were ended"
_WORD = "(?P<result>PASSED|FAILED|ERROR|SKIPPED)"
_TEST = r"(?P<path>\S+\.py)::(?P<test>\S+)"
_WITH_WORKERS = re.compile(rf"\[gw\d+\] \[ *\d+%\] {_WORD} {_TEST}")
_ALONE = re.compile(rf"{_TEST}(?: {_WORD}.*| *)$")


@dataclass(frozen=True)
class Row:
    what: str
    result: str  # ok, FAILED, missed, skipped, or empty for a figure without a target
    figure: str = ""
    target: str = ""


def rows_of(folder: Path) -> list[Row]:
    """Return the rows of all results in the folder; steps that ended early or did not run may be missing."""
    return [*_steps(folder), *_findings(folder), *_tests(folder), *_figures(folder)]


def table(rows: Sequence[Row]) -> str:
    lines = [("what", "result", "figure", "target"), *((r.what, r.result, r.figure, r.target) for r in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _steps(folder: Path) -> Iterator[Row]:
    """Yield the last recorded state of each step."""
    file = folder / "steps.tsv"
    lines = file.read_text().splitlines() if file.exists() else []
    last = {line.split("\t")[0]: line.split("\t")[1:] for line in lines if line.count("\t") == 3}
    results = {"0": "ok", "running": "FAILED: ended from outside", **dict.fromkeys(_TIMED_OUT, "FAILED: out of time")}
    for name, (status, seconds, limit) in last.items():
        if status == "skipped":  # the column of seconds has the reason
            yield Row(name, "skipped", seconds)
            continue
        yield Row(name, results.get(status, f"FAILED: status {status}"), f"{seconds} s", f"< {limit} s")


def _json(file: Path) -> Any:
    """Return the contents of a JSON file; None if the file is missing or incomplete."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _findings(folder: Path) -> Iterator[Row]:
    found = _json(folder / "doctor.json")
    if found is None:
        return
    names = Counter(device["name"] for device in found["facts"]["devices"])
    yield Row("device", "", ", ".join(f"{count} × {name}" for name, count in names.items()) or "none")
    for each in found["problems"]:
        yield Row(f"doctor: {each['what']}", each["level"], "", each["remedy"])


def _tests(folder: Path) -> Iterator[Row]:
    """Yield one row per test; tests skipped for the same reason share a row."""
    skipped: Counter[str] = Counter()
    for log in sorted(folder.glob("*.log")):
        for row in cases_of(log):
            if row.result == "skipped":
                skipped[row.figure] += 1
            else:
                yield row
    for reason, count in skipped.items():
        yield Row(f"{count} test(s)", "skipped", reason)


def cases_of(log: Path) -> list[Row]:
    """Return a row for each test, from the XML report next to the log, or from the log if pytest did not finish."""
    cases = _cases_of_xml(log.with_suffix(".xml"))
    return list(_cases_of_log(log)) if cases is None else cases


def _cases_of_xml(file: Path) -> list[Row] | None:
    """Return the rows of pytest's XML report; None if pytest did not finish."""
    try:
        # An interrupted test has no name here; the row of its step says that the tests were ended.
        cases = [case for case in ElementTree.parse(file).iter("testcase") if case.get("name")]
    except (OSError, ElementTree.ParseError):
        return None
    rows = []
    for case in cases:
        name, seconds = f"test: {case.get('name')}", f"{float(case.get('time') or 0):.1f} s"
        skip = case.find("skipped")
        if skip is not None:
            rows.append(Row(name, "skipped", (skip.get("message") or "no reason given").splitlines()[0]))
        else:
            failed = case.find("failure") is not None or case.find("error") is not None
            rows.append(Row(name, "FAILED" if failed else "ok", seconds))
    return rows


def _cases_of_log(log: Path) -> Iterator[Row]:
    """Yield the rows of an unfinished `pytest -v` log; with workers, the result precedes the test's name."""
    results = {
        "PASSED": "ok",
        "FAILED": "FAILED",
        "ERROR": "FAILED",
        "SKIPPED": "skipped",
        None: "FAILED: not finished",
    }
    found: dict[str, str] = {}
    for line in log.read_text(errors="replace").splitlines():
        if match := _WITH_WORKERS.match(line) or _ALONE.match(line):
            known = found.get(match["test"])
            found[match["test"]] = results[match["result"]] if match["result"] or known is None else known
    for test, result in found.items():
        yield Row(f"test: {test}", result, _REASON_UNKNOWN if result == "skipped" else "")


def _figures(folder: Path) -> Iterator[Row]:
    """Yield the rows of each benchmark."""
    results = {None: "", True: "ok", False: "missed"}
    for file in sorted(folder.glob("*.json")):
        for row in (_json(file) or {}).get("rows", []):
            yield Row(row["what"], results[row["met"]], row["figure"], row["target"])


def main(argv: Sequence[str]) -> int:
    rows = rows_of(Path(argv[0]))
    print("\n" + table(rows))
    return int(any(row.result.startswith("FAILED") for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
