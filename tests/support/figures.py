"""A pytest plugin that writes down what tests measured: `pytest -p tests.support.figures --figures FILE`.

For each test a line of JSON is appended to FILE: its figures (`tests/support/gates.py`), and why it failed, if it did.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.gates import take_measured


class Recorder:
    """Writes the line of each test when it has ended."""

    def __init__(self, file: Path | None) -> None:
        self._file = file  # None in a worker, whose reports reach the first process
        self._errors: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> None:
        """Attach the measured figures to the test's report, which xdist's workers send to the main process."""
        item.user_properties += [("measured", asdict(each)) for each in take_measured()]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._file is None:
            return
        if report.failed:
            self._errors.setdefault(report.nodeid, _one_line(report))
        if report.when == "teardown":
            measured = [value for name, value in report.user_properties if name == "measured"]
            line = {"test": report.nodeid, "measured": measured, "error": self._errors.get(report.nodeid)}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _one_line(report: pytest.TestReport) -> str:
    """Return why a test failed: of a process of a group, which hands its traceback on, the last line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    said = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines() or ["?"]
    return (said[-1] if "Traceback" in "".join(said[1:2]) else said[0])[:200]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="append each test's figures to this file, as lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--figures") is not None:
        worker = hasattr(config, "workerinput")
        config.pluginmanager.register(Recorder(None if worker else config.getoption("--figures").resolve()))
