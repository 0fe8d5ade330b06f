"""Cards: each family has one, docs/reports/cards.md is made from them, and a failed test is a failed gate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megavlm.families import FAMILIES
from tests.support import cards
from tests.support.card_page import page
from tests.support.gates import GATES, MEASURED, hold

NOW = {"date": "2026-11-22", "commit": "abc"}
RENEW = "renew the cards: python -m tests.support.cards --render"


def line(test: str, *figures: tuple[str, str, float], error: str | None = None) -> dict[str, object]:
    measured = [{"family": family, "gate": gate, "figure": figure} for family, gate, figure in figures]
    return {"test": test, "measured": measured, "error": error}


def test_each_registered_family_has_a_card_and_the_document_is_made_from_them() -> None:
    written = cards.read()
    assert [card["family"] for card in written] == sorted(family.name for family in FAMILIES), RENEW
    families = {family.name: family for family in FAMILIES}
    found = cards.cases_in(written)
    for card in written:
        assert card == cards.card_of(families[card["family"]], found.get(card["family"], {})), RENEW
    text = cards.DOCUMENT.read_text(encoding="utf-8")
    assert page(written, text) == text, RENEW


def test_figures_become_cards_and_come_back(tmp_path: Path) -> None:
    lines = [
        line("a.py::one[x y]", ("llava", "logits", 1e-7), ("llava", "gradients", 2e-6)),
        line("a.py::two", ("llava", "logits", 3e-7)),
        line("b.py::three", ("clip", "logits", 0.5), error="AssertionError: too large | by far"),
    ]
    cases = cards.renewed({}, lines, **NOW)
    written = {card["family"]: card["gates"] for card in cards.write(cases, tmp_path)}
    assert cards.cases_in(cards.read(tmp_path)) == cases
    logits = written["llava"]["logits"]
    assert (logits["result"], logits["figure"], len(logits["cases"])) == ("passed", 3e-7, 2)
    assert logits["cases"][0]["command"] == 'python -m pytest "a.py::one[x y]"'
    assert written["clip"]["logits"]["result"] == "FAILED"
    assert written["llava"]["losses"] == {
        "group": "Five training steps",
        "measured": "loss of a step",
        "tolerance": 1e-4,
        "result": "not measured",
    }
    assert written["llava"]["fp8"]["result"] == "needs a GPU: not run"
    assert "composed" not in written["llava"]
    assert "answers" not in written["clip"]
    made = page(cards.read(tmp_path), cards.DOCUMENT.read_text(encoding="utf-8"))
    assert "**5e-1, failed**" in made
    assert "too large / by far" in made


def test_a_test_that_fails_early_fails_the_gates_that_it_had() -> None:
    before = cards.renewed({}, [line("t", ("llava", "logits", 1e-7), ("llava", "losses", 1e-6))], **NOW)
    broken = [line("t", ("llava", "logits", 2e-7), error="boom"), line("new", error="unheard of")]
    after = cards.renewed(before, broken, date="later", commit="def")
    assert after["llava"]["logits"]["t"] == cards.Case("t", 2e-7, "boom", "later", "def")
    assert after["llava"]["losses"]["t"] == cards.Case("t", None, "boom", "later", "def")
    assert cards.unplaced(after, broken) == ["new: unheard of"]
    assert before["llava"]["losses"]["t"].error is None


@pytest.mark.parametrize("figure", [2e-4, float("nan")])
def test_a_figure_above_the_tolerance_fails_the_test_and_is_noted(figure: float) -> None:
    MEASURED.clear()
    hold("llava", "logits", GATES["logits"].tolerance)
    with pytest.raises(AssertionError, match="logits of llava 3"):
        hold("llava", "logits", figure, "logits of llava 3")
    assert len(MEASURED) == 2
    MEASURED.clear()


# Slow: starts pytest.
@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_plugin_writes_what_each_test_measured(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_it.py").write_text(
        "from tests.support.gates import hold\n"
        "def test_one():\n    hold('llava', 'logits', 1e-7)\n    hold('llava', 'logits', 5e-8)\n"
        "def test_two():\n    hold('clip', 'gradients', 1.0, 'it')\n"
        "import pytest\n@pytest.fixture\ndef broken(): raise ValueError('no')\n"
        "def test_three(broken): pass\n"
    )
    plugin = ["-p", "tests.support.figures", "--figures", str(tmp_path / "out"), "-n", workers]
    program = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), *plugin, str(tmp_path)]
    done = subprocess.run(program, cwd=cards.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    lines = {each["test"].split("::")[1]: each for each in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert lines["test_one"]["measured"] == [{"family": "llava", "gate": "logits", "figure": 1e-7}]
    assert lines["test_one"]["error"] is None
    assert lines["test_two"]["measured"] == [{"family": "clip", "gate": "gradients", "figure": 1.0}]
    assert lines["test_two"]["error"].startswith("AssertionError: clip, it: 1.0e+00")
    assert "no" in lines["test_three"]["error"]
