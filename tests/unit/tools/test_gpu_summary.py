"""The table of `tools/gpu_check.sh` from what its parts leave behind, whole or cut short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.gpu_summary import main, rows_of, table

JUNIT = """<testsuites><testsuite>
<testcase name="test_a" time="1.25"/>
<testcase name="test_b" time="0.5"><failure message="boom">long</failure></testcase>
<testcase name="test_c" time="0"><skipped message="needs a CUDA device">x</skipped></testcase>
<testcase name="test_d" time="0"><skipped message="needs a CUDA device">x</skipped></testcase>
<testcase time="0.002" />
</testsuite></testsuites>"""


def write(folder: Path, *, steps: str) -> None:
    facts = {"devices": [{"name": "NVIDIA H200"}]}
    finding = {"level": "warning", "what": "slow", "remedy": "fix"}
    (folder / "steps.tsv").write_text(steps)
    (folder / "doctor.json").write_text(json.dumps({"facts": facts, "problems": [finding]}))
    (folder / "tests.log").write_text("tests/gpu/test_x.py::test_b FAILED")
    (folder / "tests.xml").write_text(JUNIT)
    rows = [
        {"what": "LLaVA, language part", "figure": "510 TFLOP/s", "target": "≥ 500", "met": True},
        {"what": "LLaVA, memory", "figure": "1.10", "target": "< 1", "met": False},
        {"what": "LLaVA, layers", "figure": "19 of 32", "target": "", "met": None},
    ]
    (folder / "llava.json").write_text(json.dumps({"rows": rows}))


def test_everything_has_a_row(tmp_path: Path) -> None:
    write(tmp_path, steps="doctor\t0\t12\t60\ntests\t1\t100\t220\nbenchmark\t0\t180\t230\n")
    found = {row.what: (row.result, row.figure, row.target) for row in rows_of(tmp_path)}
    assert found == {
        "doctor": ("ok", "12 s", "< 60 s"),
        "tests": ("FAILED: status 1", "100 s", "< 220 s"),
        "benchmark": ("ok", "180 s", "< 230 s"),
        "device": ("", "1 × NVIDIA H200", ""),
        "doctor: slow": ("warning", "", "fix"),
        "test: test_a": ("ok", "1.2 s", ""),
        "test: test_b": ("FAILED", "0.5 s", ""),
        "2 test(s)": ("skipped", "needs a CUDA device", ""),
        "LLaVA, language part": ("ok", "510 TFLOP/s", "≥ 500"),
        "LLaVA, memory": ("missed", "1.10", "< 1"),
        "LLaVA, layers": ("", "19 of 32", ""),
    }
    lines = table(rows_of(tmp_path)).splitlines()
    assert lines[0].split() == ["what", "result", "figure", "target"]
    assert len(lines) == 1 + len(found)


@pytest.mark.parametrize(
    ("status", "code", "result"),
    [("0", 0, "ok"), ("124", 1, "FAILED: out of time"), ("running", 1, "FAILED: ended from outside")],
)
def test_steps_that_ended_early_leave_a_table_all_the_same(tmp_path, status, code, result, capsys):
    (tmp_path / "steps.tsv").write_text(f"doctor\t1\t9\t60\ndoctor\t{status}\t60\t60\ntes")
    (tmp_path / "doctor.json").write_text("")
    (tmp_path / "llava.json").write_text('{"rows": [')
    assert main([str(tmp_path)]) == code
    assert [line.split("  ")[0] for line in capsys.readouterr().out.split("\n")[1:] if line] == ["what", "doctor"]
    assert rows_of(tmp_path)[0].result == result


@pytest.mark.parametrize(
    "log",
    [
        "tests/gpu/test_x.py::test_a PASSED   [ 25%]\ntests/gpu/test_x.py::test_b[1-x] FAILED   [ 50%]\n"
        "tests/gpu/test_x.py::test_c SKIPPED (needs a CUDA device)   [ 75%]\ntests/gpu/test_x.py::test_d ",
        "tests/gpu/test_x.py::test_a \n[gw1] [ 25%] PASSED tests/gpu/test_x.py::test_a \n"
        "tests/gpu/test_x.py::test_b[1-x] \ntests/gpu/test_x.py::test_c \ntests/gpu/test_x.py::test_d \n"
        "[gw0] [ 50%] FAILED tests/gpu/test_x.py::test_b[1-x] \n[gw3] [ 75%] SKIPPED tests/gpu/test_x.py::test_c \n",
    ],
    ids=["alone", "workers"],
)
def test_tests_that_were_ended_are_read_from_what_was_printed(log: str, tmp_path: Path) -> None:
    (tmp_path / "tests.log").write_text(f"collecting ... collected 4 items\n\n{log}")
    found = {row.what.removeprefix("test: "): row.result for row in rows_of(tmp_path)}
    expected = {"test_a": "ok", "test_b[1-x]": "FAILED", "test_d": "FAILED: not finished", "1 test(s)": "skipped"}
    assert found == expected
