"""docs/reports/cards.md from the cards: a table of families for each subject, and the gates of another project."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

from benchmarks.tables import with_table
from tests.support.gates import EXPERT_LAYOUTS, GATES, LAYOUTS, larger

Card = Mapping[str, Any]

# A table for each subject: its title, and the gates of each column, of which the worst is shown.
SUBJECTS: dict[str, dict[str, tuple[str, ...]]] = {
    "One process": {
        **{"files": ("import_export",), "logits": ("logits",), "1 − cosine": ("cosine",), "gradients": ("gradients",)},
        **{"losses": ("losses",), "a record": ("record",), "packed": ("packed_logits",)},
        "packed, gradients": ("packed_gradients",),
    },
    "Five losses at layouts": {layout.title: (f"{name}_losses",) for name, layout in LAYOUTS.items()},
    "Worst of all layouts": {
        f"{figure}{title}": tuple(gate for name in layouts if (gate := f"{name}_{figure}") in GATES)
        for title, layouts in (("", LAYOUTS), (", experts split", EXPERT_LAYOUTS))
        for figure in ("logits", "gradients", "losses")
    },
    "Answers, resume and LoRA": {
        **{"answers": ("answers",), "export's answers": ("generation",), "resume": ("resume",)},
        **{"other layout": ("reshard",), "LoRA, gradients": ("lora_gradients",), "losses": ("lora_losses",)},
        "merged": ("lora_merged",),
    },
    "Video": {
        **{"logits": ("video_logits",), "gradients": ("video_gradients",), "losses": ("video_losses",)},
        "from a clip": ("video_record",),
    },
}
PARTS = {"features or logits": ("logits",), "gradients": ("gradients",), "composed, TP2·PP2": ("composed",)}
# Megatron-Bridge's gate, what it asks for, and the gates here that ask for the same.
COMPARED = (
    ("conversion there and back", "equal keys, shapes, types and values", ("import_export",)),
    ("forward pass", "the same next token, cosine at least 0.99", ("logits", "cosine", "record")),
    ("inference", "greedy text twice the same", ("answers",)),
    ("pretraining; fine-tuning", "10 to 100 finite losses", ("losses", "tp2-pp2-vpp2_losses", "zero3_losses")),
    ("export of the fine-tuned model", "greedy text twice the same", ("generation",)),
    ("long context", "steps with packing and context parallelism", ("packed_logits", "packed_gradients")),
    ("PEFT", "as fine-tuning", ("lora_gradients", "lora_losses", "lora_merged")),
    ("resume", "losses within 1 %, same layout", ("resume", "reshard")),
)


def page(cards: Sequence[Card], text: str) -> str:
    """Return the document with the tables of these cards."""
    text = with_table(text, "cards: families", "\n\n".join([measured_at(cards), *failures(cards), *tables(cards)]))
    return with_table(text, "cards: compared", compared(cards))


def measured_at(cards: Iterable[Card]) -> str:
    """Return a sentence that says how many gates have figures, and of which commits."""
    entries = [entry for card in cards for entry in card["gates"].values()]
    counts = {result: sum(entry["result"] == result for entry in entries) for result in ("passed", "FAILED")}
    dates: dict[str, str] = {case["commit"]: case["date"] for entry in entries for case in entry.get("cases", ())}
    at = ", ".join(f"`{commit}` ({date})" for commit, date in sorted(dates.items(), key=lambda pair: pair[1]))
    rest = len(entries) - sum(counts.values())
    return (
        f"{counts['passed']} figures are within their tolerances, {counts['FAILED']} gates failed, {rest} were not "
        f"measured. The program was that of {at or 'no commit so far'}."
    )


def failures(cards: Iterable[Card]) -> list[str]:
    """Return a line for each test that failed: its family, its gate and the first line of its error."""
    return [
        f"**Failed**: {card['family']}, {entry['group']}: {_plain(case['error'])} (`{case['command']}`)"
        for card in cards
        for entry in card["gates"].values()
        for case in entry.get("cases", ())
        if "error" in case
    ]


def tables(cards: Sequence[Card]) -> list[str]:
    """Return a table of the whole models for each subject, and one of towers and language models."""
    whole = [card for card in cards if "import_export" in card["gates"]]
    parts = [card for card in cards if "import_export" not in card["gates"]]
    found = [table(title, columns, whole) for title, columns in SUBJECTS.items()]
    return [*filter(None, found), table("Towers and language models", PARTS, parts)]


def table(title: str, columns: Mapping[str, Sequence[str]], cards: Sequence[Card]) -> str:
    """Return a table with a column for some gates and a row for each family that has a figure of one of them."""
    rows = [_row(["at most", *(number(GATES[gates[0]].tolerance) for gates in columns.values())])]
    for card in cards:
        cells = [cell([card["gates"].get(gate, {}) for gate in gates]) for gates in columns.values()]
        if set(cells) != {"–"}:
            rows.append(_row([card["family"], *cells]))
    return "\n".join([*_head([title, *columns]), *rows]) if len(rows) > 1 else ""


def cell(entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the worst figure of some gates of one tolerance, or a dash where there is none."""
    cases = [entry for entry in entries if "cases" in entry]
    figures = [entry["figure"] for entry in cases if entry["figure"] is not None]
    shown = number(reduce(larger, figures)) if figures else "?" if cases else "–"
    return f"**{shown}, failed**" if any(entry["result"] == "FAILED" for entry in cases) else shown


def number(value: float) -> str:
    """Return a figure with one digit, 0 as it is."""
    if not value:
        return "0"
    digits, exponent = f"{value:.0e}".split("e") if value == value else ("nan", "0")
    return f"{digits}e{int(exponent)}" if digits != "nan" else "nan"


def compared(cards: Sequence[Card]) -> str:
    """Return the table of Megatron-Bridge's gates and ours, with the worst figure of all families."""
    rows = []
    for theirs, required, names in COMPARED:
        ours = "; ".join(f"{GATES[name].group}: {GATES[name].figure}, {worst(cards, name)}" for name in names)
        rows.append(_row([theirs, required, ours]))
    return "\n".join([*_head(["Megatron-Bridge's gate", "requires", "here, and the worst figure"]), *rows])


def worst(cards: Iterable[Card], name: str) -> str:
    """Return the largest figure of a gate, and how many families have one."""
    found: float | None = None
    entries = [entry for card in cards if "cases" in (entry := card["gates"].get(name, {}))]
    for entry in entries:
        found = found if entry["figure"] is None else larger(found, entry["figure"])
    failed = sum(entry["result"] == "FAILED" for entry in entries)
    more = f", {failed} failed" if failed else ""
    return "not measured" if found is None else f"{number(found)} ({len(entries)} families{more})"


def _plain(text: str) -> str:
    """Return text that cannot end a code span or a cell."""
    return text.replace("|", "/").replace("`", "'")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _head(titles: Sequence[str]) -> list[str]:
    return [_row(titles), "|" + "---|" * len(titles)]
