"""A pytest plugin that writes down what each test file cost: `pytest -p tests.support.record --record FILE`.

For each test file a line of JSON is appended to FILE: how many tests passed, failed and were skipped, seconds by the
clock, seconds of processor time, and the figures of Hugging Face families that tests handed to `hold`. Processor time
is that of pytest and of all processes that it started, so that it says the same on a machine that is busy.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.gates import MEASURED

COSTLY = 1.0  # seconds of processor time from which a test is listed by itself


def processor_seconds() -> float:
    """Return what this process and its descendants have used, with those that have ended and were waited for."""
    here = psutil.Process()
    total = 0.0
    for process in (here, *here.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile: its parent's times hold its own
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class Recorder:
    """Writes a line when the last test of a file has run."""

    def __init__(self, file: Path, root: Path) -> None:
        self._file, self._root = file, root
        self._begin()

    def _begin(self) -> None:
        self._outcomes: dict[str, str] = {}
        self._skips: Counter[str] = Counter()
        self._costs: dict[str, float] = {}
        self._began = (time.monotonic(), processor_seconds())
        self._used = self._began[1]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
        result = yield
        now = processor_seconds()
        self._costs[item.nodeid] = now - self._used
        self._used = now
        if nextitem is None or nextitem.path != item.path:
            self._write(str(item.path.relative_to(self._root)))
            self._begin()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        worst = self._outcomes.get(report.nodeid)
        if report.failed or worst is None or (report.when == "call" and worst != "failed"):
            self._outcomes[report.nodeid] = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skips[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def _write(self, name: str) -> None:
        ended = (time.monotonic(), self._used)
        seconds, processor = (round(end - begin, 1) for end, begin in zip(ended, self._began, strict=True))
        outcomes = list(self._outcomes.values())
        line = {
            "file": name,
            **{outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")},
            "seconds": seconds,
            "processor_seconds": processor,
            "failures": [test for test, outcome in self._outcomes.items() if outcome == "failed"],
            "skips": self._skips,
            "figures": [(*key, figure) for key, figure in MEASURED.items()],  # family, gate and the worst of the file
            "costly": {test: round(cost, 1) for test, cost in self._costs.items() if cost >= COSTLY},
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        MEASURED.clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="append what each test file cost to this file, as lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record") is not None:
        config.pluginmanager.register(Recorder(config.getoption("--record").resolve(), config.rootpath))
