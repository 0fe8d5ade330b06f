"""Write what tests measured of each Hugging Face family to docs/reports/cards.md.

A pytest plugin, which `make cards` loads: `pytest -p tests.support.cards --cards FILE`. The page is written if no test
failed, of all figures that tests handed to `hold` (`tests/support/gates.py`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import with_table
from tests.support.gates import EXPERT_LAYOUTS, LAYOUTS, MEASURED, TOLERANCES, larger

# A table for each subject: its title, and the gates of each column, of which the worst is shown.
SUBJECTS: dict[str, dict[str, Collection[str]]] = {
    "One process": {
        **{"files": ["import_export"], "logits": ["logits"], "1 − cosine": ["cosine"], "gradients": ["gradients"]},
        **{"losses": ["losses"], "a record": ["record"], "packed": ["packed_logits"]},
        "packed, gradients": ["packed_gradients"],
    },
    "Worst of all layouts": {
        f"{figure}{title}": [f"{name}_{figure}" for name in layouts]
        for title, layouts in (("", LAYOUTS), (", experts split", EXPERT_LAYOUTS))
        for figure in ("logits", "gradients", "losses")
    },
    "Answers, resume and LoRA": {
        **{"answers": ["answers"], "resume": ["resume"]},
        **{"other layout": ["reshard"], "LoRA, gradients": ["lora_gradients"], "losses": ["lora_losses"]},
        "merged": ["lora_merged"],
    },
    "Video": {
        **{"logits": ["video_logits"], "gradients": ["video_gradients"], "losses": ["video_losses"]},
        "from a clip": ["video_record"],
    },
}
PARTS = {"features or logits": ["logits"], "gradients": ["gradients"], "composed, TP2·PP2": ["composed"]}
Cards = dict[str, dict[str, float]]  # of each family, the worst figure of each gate


class Recorder:
    """Collects what each test measured; xdist's workers send it to the first process with their reports."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._cards: Cards = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> None:
        item.user_properties += [("measured", (*key, figure)) for key, figure in MEASURED.items()]
        MEASURED.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: list[tuple[str, Any]] = report.user_properties
        for name, value in properties:
            if name == "measured":
                family, gate, figure = value
                card = self._cards.setdefault(family, {})
                card[gate] = larger(card.get(gate, 0.0), float(figure))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == 0 and not hasattr(session.config, "workerinput"):
            self._file.write_text(page(self._cards, self._file.read_text(encoding="utf-8")), encoding="utf-8")


def page(cards: Cards, text: str) -> str:
    """Return the document with the tables of these cards."""
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    count = sum(map(len, cards.values()))
    said = f"{count} figures, of `{asked.stdout.strip() or 'no commit'}` ({datetime.now(UTC).date().isoformat()})."
    whole = {name: card for name, card in cards.items() if "import_export" in card}
    parts = {name: card for name, card in cards.items() if name not in whole}
    tables = [table(title, columns, whole) for title, columns in SUBJECTS.items()]
    return with_table(text, "cards", "\n\n".join([said, *tables, table("Towers and language models", PARTS, parts)]))


def table(title: str, columns: Mapping[str, Collection[str]], cards: Cards) -> str:
    """Return a table with a column for some gates and a row for each family that has a figure of one of them."""
    rows = [[title, *columns], ["---"] * (1 + len(columns))]
    rows += [["at most", *(number(TOLERANCES[min(gates)]) for gates in columns.values())]]
    for family, card in sorted(cards.items()):
        found = [[card[gate] for gate in gates if gate in card] for gates in columns.values()]
        if any(found):
            rows.append([family, *(number(reduce(larger, figures)) if figures else "–" for figures in found)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def number(value: float) -> str:
    """Return a figure with one digit, 0 as it is."""
    digits, _, exponent = f"{value:.0e}".partition("e")
    return f"{digits}e{int(exponent)}" if value else "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cards", type=Path, help="write the figures of all tests to this page")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cards") is not None:
        config.pluginmanager.register(Recorder(config.getoption("--cards").resolve()))
