"""Write what tests measured of each Hugging Face family to docs/reports/cards.md.

Usage: `python -m tests.support.cards RECORD`. RECORD is a folder of `make test-all`, or of its pieces that
`make cards` runs: it has all figures that tests handed to `hold` (`tests/support/gates.py`). Nothing is written where a
file of tests that measures has failed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from functools import reduce
from pathlib import Path

from benchmarks.tables import with_table
from tests.support.gates import EXPERT_LAYOUTS, LAYOUTS, TOLERANCES, larger
from tests.support.pieces import ROOT, lines_of

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


def cards_of(record: Path) -> Cards:
    """Return the figures in a record of tests.

    Raises ValueError where a file of tests that measures has failed, or where nothing was measured.
    """
    cards: Cards = {}
    for file in lines_of(record / "files.jsonl"):
        if file["figures"] and file["failures"]:
            raise ValueError(f"{file['file']}: {', '.join(file['failures'])} failed")
        for family, gate, figure in file["figures"]:
            card = cards.setdefault(family, {})
            card[gate] = larger(card.get(gate, 0.0), figure)
    if not cards:
        raise ValueError(f"{record}: no test measured a family")
    return cards


def page(cards: Cards, text: str, said: str) -> str:
    """Return the document with the tables of these cards below a sentence that says where they come from."""
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


def main(record: Path, file: Path = ROOT / "docs/reports/cards.md") -> None:
    """Write the page of a record's figures."""
    cards, ended = cards_of(record), lines_of(record / "pieces.jsonl")
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(piece["commit"] for piece in ended))
    said = f"{sum(map(len, cards.values()))} figures, of {commits} ({ended[-1]['ended'][:10]})."
    file.write_text(page(cards, file.read_text(encoding="utf-8"), said), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
