"""`make test-all`: pieces, what is recorded of them, and how an interrupted run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pieces import busy_seconds, lines_of, pieces, run_all

TESTS = {
    "unit/test_a.py": "import pytest\ndef test_passes(): pass\ndef test_fails(): assert 0\n"
    "def test_skips(): pytest.skip('why')\n@pytest.fixture\ndef broken(): 1 / 0\ndef test_breaks(broken): pass\n",
    "unit/deep/test_b.py": "def test_passes(): sum(range(10**7))\n",
    "dist/test_c.py": "import os\ndef test_dies(): os.kill(os.getpid(), 9)\n",
    "dist/test_d.py": "def test_passes(): pass\n",
    "support/pool.py": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, code in TESTS.items():
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    return tmp_path


@pytest.mark.slow
def test_a_record_says_what_ran_and_how_it_ended(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = root / "record"
    assert pieces(root) == ["tests/dist/test_c.py", "tests/dist/test_d.py", "tests/unit"]
    assert not run_all(pieces(root), record, root=root)
    ended = {piece["name"]: piece["status"] for piece in lines_of(record / "pieces.jsonl")}
    assert ended == {"tests/dist/test_c.py": -9, "tests/dist/test_d.py": 0, "tests/unit": 1}
    files = {each["file"]: each for each in lines_of(record / "files.jsonl")}
    assert [files["tests/unit/test_a.py"][name] for name in ("passed", "failed", "skipped")] == [1, 2, 1]
    assert files["tests/unit/deep/test_b.py"]["processor_seconds"] > 0
    summary = (record / "summary.md").read_text()
    assert "3 passed, 2 failed, 1 skipped" in summary
    assert "`tests/unit/test_a.py::test_breaks`" in summary
    assert "Skipped:\n\n- 1: why\n" in summary
    assert "- tests/dist/test_c.py ended early: status -9" in summary
    assert ", commit unknown." in summary, "the folder is in no repository"

    (root / "tests/dist/test_c.py").write_text(TESTS["dist/test_d.py"])
    lines = (record / "pieces.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if "test_c.py" not in line]  # as if it had been interrupted
    (record / "pieces.jsonl").write_text("".join(kept))
    (record / "dist-test_c.jsonl").write_text('{"file": "tests/dist/test_c.py", "passed": 7}\n')
    assert not run_all(pieces(root), record, root=root)
    assert "tests/dist/test_d.py: ended before" in capsys.readouterr().out
    assert len(lines_of(record / "files.jsonl")) == 4
    assert "4 passed, 2 failed, 1 skipped" in (record / "summary.md").read_text()


def test_pieces_beside_each_other_share_the_clock() -> None:
    ended = [("00:10:00", 300.0), ("00:11:00", 120.0), ("00:30:00", 60.0), ("00:31:00", 600.0)]
    rows = [{"ended": f"2026-01-01T{at}+00:00", "seconds": seconds} for at, seconds in ended]
    assert busy_seconds(rows) == 300 + 60 + 600
