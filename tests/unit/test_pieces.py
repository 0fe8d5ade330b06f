"""`make test-all`: pieces, what is recorded of them, and how an interrupted run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pieces import lines_of, pieces, run_all, run_failed

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
    assert [piece["status"] for piece in lines_of(record / "pieces.jsonl")] == [-9, 0, 1]
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
    ended = (record / "pieces.jsonl").read_text().splitlines(keepends=True)
    (record / "pieces.jsonl").write_text("".join(ended[1:]))  # as if the first had been interrupted
    assert not run_all(pieces(root), record, root=root)
    assert "tests/dist/test_d.py: ended before" in capsys.readouterr().out
    assert len(lines_of(record / "files.jsonl")) == 4
    assert "4 passed, 2 failed, 1 skipped" in (record / "summary.md").read_text()


@pytest.mark.slow
def test_what_failed_runs_again(root: Path) -> None:
    record, file = root / "record", root / "tests/unit/test_a.py"
    assert not run_all(["tests/dist/test_d.py", "tests/unit"], record, root=root)
    assert not run_failed(record, root=root), "nothing was mended"
    assert "- `tests/unit/test_a.py::test_breaks`\n" in (record / "summary.md").read_text()
    file.write_text(TESTS["unit/test_a.py"].replace("assert 0", "pass").replace("1 / 0", "pass"))
    assert run_failed(record, root=root)
    assert "5 passed, 0 failed, 1 skipped" in (record / "summary.md").read_text()
    file.unlink()
    assert run_failed(record, root=root), "what has passed does not run again"
