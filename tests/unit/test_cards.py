"""Cards: what tests measure of a family is held to its tolerance, and written to a page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cards import page
from tests.support.gates import MEASURED, TOLERANCES, hold

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("figure", [2e-4, float("nan")])
def test_a_figure_above_the_tolerance_fails_the_test(figure: float) -> None:
    hold("llava", "logits", TOLERANCES["logits"])
    with pytest.raises(AssertionError, match="logits of llava 3"):
        hold("llava", "logits", figure, "logits of llava 3")
    MEASURED.clear()


def test_the_worst_figure_of_each_family_is_in_its_row() -> None:
    cards = {"llava": {"import_export": 0.0, "tp2_logits": 1e-7, "pp2_logits": 3e-6}, "clip": {"logits": 2e-7}}
    made = page(cards, "before <!-- cards --> old <!-- end --> after")
    assert "| llava | 3e-6 | – | – | – | – | – |" in made
    assert "| llava | 0 | – | – | – | – | – | – | – |" in made
    assert "| clip | 2e-7 | – | – |" in made
    assert "old" not in made


@pytest.mark.slow
def test_the_plugin_writes_what_all_tests_measured(tmp_path: Path) -> None:
    test = "from tests.support.gates import hold\n@pytest.mark.parametrize('n', [1, 5, 2])\n"
    test = f"import pytest\n{test}def test_it(n): hold('clip', 'logits', n * 1e-7)\n"
    for more, expected in (
        ("", "| clip | 5e-7 | – | – |"),
        ("def test_other(): assert 0\n", "<!-- cards --> <!-- end"),
    ):
        (tmp_path / "page.md").write_text("<!-- cards --> <!-- end -->")
        (tmp_path / "test_it.py").write_text(test + more)
        plugin = ["-p", "tests.support.cards", "--cards", str(tmp_path / "page.md"), "-n", "2"]
        program = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), *plugin, str(tmp_path)]
        subprocess.run(program, cwd=ROOT, check=False, capture_output=True)
        assert expected in (tmp_path / "page.md").read_text()
