"""Every figure that README.md shows stands in docs/reports/measured.md, and there in a record or as measured once."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs/reports/measured.md"
# `1.05 ×` but not the `4 ×` of a size (`4 × 4 pixels`) or of a layout (`TP × PP`).
FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)? (?:×(?! [A-Z\d])|%|s\b|ms\b|min\b|MiB\b|GiB\b|TFLOP/s)")
TOLERANCE = re.compile(r"\b1e-\d+\b")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("measured")


def test_the_table_is_made_of_the_records(measured: Any) -> None:
    text = MEASURED.read_text(encoding="utf-8")
    assert "| CPU training step, one process" in text
    assert measured.documented(text) == text, "renew it: python benchmarks/measured.py --write"


def test_readme_shows_only_measured_figures() -> None:
    figures = FIGURE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert figures
    assert set(figures) <= set(FIGURE.findall(MEASURED.read_text(encoding="utf-8")))


def test_a_figure_is_the_median_of_the_runs_of_an_idle_machine(measured: Any) -> None:
    row = measured.Row("speed", "x", "run", lambda record: record.get("speed"), by_the_clock=True, since="2026-11-02")
    common = {"cpu": "Some", "cores": 2, "python": "3.11", "torch": "2", "megatron-core": "1", "transformers": "5"}
    found = [
        {**common, "date": f"2026-11-0{day}", "load_average_before": load, **speed}
        for day, load, speed in (
            (1, 0.1, {"speed": 9.0}),  # of another program
            (2, 0.1, {"speed": 1.0}),
            (3, 9.0, {"speed": 8.0}),  # of a busy machine
            (4, 0.2, {"speed": 1.5}),
            (5, 0.3, {"speed": 1.1}),
            (6, 0.3, {}),
        )
    ]
    cells = measured.line(row, measured.samples(row, found), [measured.machine(found[0])])
    assert cells == "| speed | 1.10 × | 1.00 to 1.50 | 3 runs, 2026-11-05, A 0.1–0.3 |"
    busy = measured.line(row, measured.samples(row, found[2:3]), [measured.machine(found[0])])
    assert busy == "| speed | 8.00 × | – | one run, 2026-11-03, A 9.0, **busy** |"


def rows() -> dict[str, tuple[str, str]]:
    """Return the figure and the number of runs of each row of the tables, which are made of the records."""
    lines = MEASURED.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return {row[0]: (row[1], row[3].split(",")[0]) for row in cells if len(row) == 4}


LLAVA = "LLaVA-1.5-7B, bf16"
# Where README shows one of these figures, the same sentences show all of them, and say how many runs there were.
TOGETHER = (
    (
        f"{LLAVA}: times as fast as Transformers with autocast",
        f"{LLAVA}: times as fast as Transformers wholly in bf16",
        f"{LLAVA}: step",
        f"{LLAVA} of JPEG files: step",
        f"{LLAVA}: whole step",
        f"{LLAVA}: whole step, MFU",
        f"{LLAVA}: language part",
        "LLaVA-1.5-7B, fp8: whole step",
        "LLaVA-1.5-7B, fp8: times as fast as Transformers with autocast",
    ),
    ("the same: throughput of iterations that stay, over a run without",),
    ("CPU training step, one process: throughput over Transformers'",),
    ("median error of step times, 16 configurations of two processes",),
)


@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: names[0])
def test_readme_shows_a_figure_with_those_that_qualify_it(names: tuple[str, ...]) -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What is measured")[2]
    known = rows()
    figure, runs = known[names[0]]
    bullets = [" ".join(bullet.split()) for bullet in section.split("\n- ")]
    (said,) = (bullet for bullet in bullets if figure in bullet)
    assert runs in said, f"README does not say that {figure} is of {runs}"
    for name in names:
        assert known[name][0] in said, f"README shows {figure} without {known[name][0]}: {name}"
    if names[0].startswith("median error"):
        assert "2026-11-21" in said
        assert "until it is measured again" in said


def test_the_whole_step_stands_before_its_language_part() -> None:
    for name in ("README.md", "docs/reports/measured.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert text.index("430 TFLOP/s") < text.index("611 TFLOP/s"), name


def test_what_is_said_of_all_tests_is_their_record() -> None:
    record = (ROOT / "benchmarks/records/test_all/summary.md").read_text(encoding="utf-8")
    passed, failed, skipped = re.findall(r"(\d+) (?:passed|failed|skipped)", record)[:3]
    commits = re.findall(r"\bcommits? ([\da-f, ]+)\.", record)[0].split(", ")
    later, gone = (len(re.findall(rf": {word} at ", record)) for word in ("passed", "gone"))
    numbers = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 1: "one", 2: "two"}
    said = " ".join(MEASURED.read_text(encoding="utf-8").split())
    expected = (
        f"pieces ran at {numbers[len(commits)]} commits" if len(commits) > 1 else "",
        f"{int(passed):,} have passed",
        f"{failed} failed, of which {later} have passed since at later commits and {numbers.get(gone, gone)}",
        f"{skipped} were skipped",
    )
    assert [words for words in expected if words not in said] == []


def claims() -> Iterator[tuple[str, str]]:
    """Yield the tolerance and the test of each row of the table of tests."""
    section = MEASURED.read_text(encoding="utf-8").partition("## What tests hold")[2]
    for _, tolerance, test in re.findall(r"^\| (.+) \| (.+) \| `(tests/.+)` \|$", section, flags=re.MULTILINE):
        yield tolerance, test


def test_tolerances_are_those_of_the_tests() -> None:
    found = list(claims())
    assert len(found) > 10
    for tolerance, tests in found:
        text = "".join((ROOT / test).read_text(encoding="utf-8") for test in tests.split("`, `"))
        for helper in re.findall(r"^from (tests[.\w]+) import", text, flags=re.MULTILINE):
            path = ROOT / (helper.replace(".", "/") + ".py")
            text += path.read_text(encoding="utf-8") if path.exists() else ""
        for number in TOLERANCE.findall(tolerance):
            assert number in text, f"{tests} do not say {number}"
