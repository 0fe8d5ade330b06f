"""What tests have of their own: pieces of `make test-all`, covers of cases, and cards of families."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cards import main, page
from tests.support.covering import covering, pairs
from tests.support.gates import MEASURED, TOLERANCES, hold
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
    kept = root / "benchmarks/records/test_all/pieces.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"name": "tests/dist/test_d.py", "seconds": 2}\n{"name": "tests/unit", "seconds": 9}\n')
    assert pieces(root) == ["tests/dist/test_c.py", "tests/unit", "tests/dist/test_d.py"], "a new one, then the dearest"
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
    left = [line for line in lines if "test_c.py" not in line]  # as if it had been interrupted
    (record / "pieces.jsonl").write_text("".join(left))
    (record / "dist-test_c.jsonl").write_text('{"file": "tests/dist/test_c.py", "passed": 7}\n')
    assert not run_all(pieces(root), record, root=root)
    assert "tests/dist/test_d.py: ended before" in capsys.readouterr().out
    assert len(lines_of(record / "files.jsonl")) == 4
    assert "4 passed, 2 failed, 1 skipped" in (record / "summary.md").read_text()


def test_pieces_beside_each_other_share_the_clock() -> None:
    ended = [("00:10:00", 300.0), ("00:11:00", 120.0), ("00:30:00", 60.0), ("00:31:00", 600.0)]
    rows = [{"ended": f"2026-01-01T{at}+00:00", "seconds": seconds} for at, seconds in ended]
    assert busy_seconds(rows) == 300 + 60 + 600


CASES = st.lists(st.tuples(*3 * [st.integers(0, 4)]), unique=True, max_size=60)


def shows(case: tuple[int, ...]) -> set[tuple[object, object]]:
    return pairs(*([(place, value)] for place, value in enumerate(case)))


@given(CASES)
def test_nothing_that_a_case_shows_is_lost(cases: list[tuple[int, ...]]) -> None:
    cover = covering(cases, shows)
    assert cover == [case for case in cases if case in cover]
    assert set().union(*map(shows, cover)) == set().union(*map(shows, cases))


def test_a_cover_of_pairs_is_far_smaller_than_the_product() -> None:
    assert len(covering([(a, b, c) for a in range(5) for b in range(5) for c in range(5)], shows)) < 40


@pytest.mark.parametrize("figure", [2e-4, float("nan")])
def test_a_figure_above_the_tolerance_fails_the_test(figure: float) -> None:
    hold("llava", "logits", TOLERANCES["logits"])
    with pytest.raises(AssertionError, match="logits of llava 3"):
        hold("llava", "logits", figure, "logits of llava 3")
    MEASURED.clear()


def test_the_worst_figure_of_each_family_is_in_its_row() -> None:
    cards = {"llava": {"import_export": 0.0, "tp2_logits": 1e-7, "pp2_logits": 3e-6}, "clip": {"logits": 2e-7}}
    made = page(cards, "before <!-- cards --> old <!-- end --> after", "said")
    assert "| llava | 3e-6 | – | – | – | – | – |" in made
    assert "| llava | 0 | – | – | – | – | – | – | – |" in made
    assert "| clip | 2e-7 | – | – |" in made
    assert "old" not in made


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "def test_other(): assert 0\n"])
def test_cards_are_of_a_record_whose_measuring_tests_passed(more: str, tmp_path: Path) -> None:
    test = "import pytest\nfrom tests.support.gates import hold\n@pytest.mark.parametrize('n', [1, 5, 2])\n"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(f"{test}def test_it(n): hold('clip', 'logits', n * 1e-7)\n{more}")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    file = tmp_path / "page.md"
    file.write_text("<!-- cards --> <!-- end -->")
    run_all(["tests"], tmp_path / "record", root=tmp_path)
    if more:
        with pytest.raises(ValueError, match=r"test_it\.py: .*test_other failed"):
            main(tmp_path / "record", file)
    else:
        main(tmp_path / "record", file)
        assert "| clip | 5e-7 | – | – |" in file.read_text()
        assert "\n1 figures, of `unknown` (20" in file.read_text()
