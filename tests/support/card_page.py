"""docs/reports/cards.md from the cards: all families by all gates, what others publish, and a table for each family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from benchmarks.tables import with_table
from tests.support.gates import GATES, larger

Card = Mapping[str, Any]

# Megatron-Bridge's gate, what it asks for, and the gates here that ask for the same.
COMPARED = (
    (
        "conversion to Megatron and back, on CPU and GPU",
        "equal keys, shapes, types and values where nothing is rounded",
        ("import_export",),
    ),
    (
        "forward pass",
        "the next token of one prompt is the same, cosine of its logits at least 0.99",
        ("logits", "cosine", "record"),
    ),
    ("inference", "greedy text twice the same", ("answers",)),
    (
        "pretraining; fine-tuning",
        "finite losses and no skipped step in 10 to 100 steps",
        ("losses", "tp2-pp2-vpp2_losses", "zero3_losses"),
    ),
    ("export of the fine-tuned model", "Transformers loads it; greedy text twice the same", ("generation",)),
    (
        "long context",
        "steps with packing and context parallelism together",
        ("packed_logits", "packed_gradients"),
    ),
    ("PEFT", "as fine-tuning", ("lora_gradients", "lora_losses", "lora_merged")),
    ("resume", "loss of the first and the last step within 1 %, same layout", ("resume", "reshard")),
    ("–", "gradients", ("gradients", "tp2-pp2-vpp2_gradients", "colocated_gradients")),
    ("–", "video", ("video_logits", "video_gradients", "video_record")),
)


def page(cards: Sequence[Card], text: str) -> str:
    """Return the document with the tables of these cards."""
    text = with_table(text, "cards: summary", summary(cards))
    text = with_table(text, "cards: compared", compared(cards))
    return with_table(text, "cards: families", "\n\n".join(map(section, cards)))


def summary(cards: Sequence[Card]) -> str:
    """Return what was measured when, and a table of gates by families: whole models, then parts."""
    whole = [card for card in cards if "import_export" in card["gates"]]
    parts = [card for card in cards if "import_export" not in card["gates"]]
    return "\n\n".join([measured_at(cards), grid(whole), grid(parts)])


def measured_at(cards: Iterable[Card]) -> str:
    """Return a sentence that says how many gates there are figures of, and of which commits."""
    entries = [entry for card in cards for entry in card["gates"].values()]
    counts = {result: sum(entry["result"] == result for entry in entries) for result in ("passed", "FAILED")}
    dates: dict[str, str] = {case["commit"]: case["date"] for entry in entries for case in entry.get("cases", ())}
    at = ", ".join(f"`{commit}` ({date})" for commit, date in sorted(dates.items(), key=lambda pair: pair[1]))
    rest = len(entries) - sum(counts.values())
    return (
        f"{counts['passed']} figures are within their tolerances, {counts['FAILED']} gates failed, {rest} were not "
        f"measured. The program was that of {at or 'no commit so far'}."
    )


def grid(cards: Sequence[Card]) -> str:
    """Return a table with a row for each group of gates and a column for each family."""
    known = [name for name in GATES if any(name in card["gates"] for card in cards)]
    rows = []
    for group, names in groupby(known, key=lambda name: GATES[name].group):
        gates = list(names)
        title = group if len(gates) == 1 else f"{group}: {' · '.join(name.split('_')[-1] for name in gates)}"
        tolerances = " · ".join(number(GATES[name].tolerance) for name in gates)
        cells = [" · ".join(cell(card["gates"][name]) for name in gates if name in card["gates"]) for card in cards]
        rows.append(_row([title, tolerances, *cells]))
    return "\n".join([*_head(["gate", "at most", *(card["family"] for card in cards)]), *rows])


def cell(entry: Mapping[str, Any]) -> str:
    """Return the figure of a gate, or why there is none."""
    if "cases" not in entry:
        return "needs a GPU" if entry["result"].startswith("needs") else "–"
    shown = "?" if entry["figure"] is None else number(entry["figure"])
    return f"**{shown}, failed**" if entry["result"] == "FAILED" else shown


def number(value: float) -> str:
    """Return a figure with one digit, 0 as it is."""
    if not value:
        return "0"
    digits, exponent = f"{value:.0e}".split("e") if value == value else ("nan", "0")
    return f"{digits}e{int(exponent)}" if digits != "nan" else "nan"


def compared(cards: Sequence[Card]) -> str:
    """Return the table of Megatron-Bridge's gates and ours, with the worst figure of all families."""
    rows = []
    for theirs, asked, names in COMPARED:
        tolerances = "; ".join(f"{GATES[name].group}: {GATES[name].figure}, {_at_most(name)}" for name in names)
        rows.append(_row([theirs, asked, tolerances, "; ".join(worst(cards, name) for name in names)]))
    return "\n".join([*_head(["Megatron-Bridge's gate", "asks for", "here", "worst figure here"]), *rows])


def _at_most(name: str) -> str:
    return "none" if not GATES[name].tolerance else f"at most {number(GATES[name].tolerance)}"


def worst(cards: Iterable[Card], name: str) -> str:
    """Return the largest figure of a gate, and of how many families there is one."""
    found: float | None = None
    entries = [entry for card in cards if "cases" in (entry := card["gates"].get(name, {}))]
    for entry in entries:
        found = found if entry["figure"] is None else larger(found, entry["figure"])
    failed = sum(entry["result"] == "FAILED" for entry in entries)
    told = f", {failed} failed" if failed else ""
    return "not measured" if found is None else f"{number(found)} ({len(entries)} families{told})"


def section(card: Card) -> str:
    """Return the table of one family."""
    rows = []
    for entry in card["gates"].values():
        cases = entry.get("cases", ())
        commits = ", ".join(dict.fromkeys(f"`{case['commit']}`, {case['date']}" for case in cases))
        most = max(cases, key=lambda case: ("error" in case, case.get("figure") or 0), default=None)
        more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        command = f"`{most['command']}`{more}" if most else ""
        said = entry["result"] + (f": {_plain(most['error'])}" if most and "error" in most else "")
        figure = cell(entry) if cases else "–"
        rows.append(
            _row([f"{entry['group']}: {entry['measured']}", number(entry["tolerance"]), figure, said, commits, command])
        )
    head = _head(["gate", "at most", "figure", "result", "commit", "command"])
    kinds = ", ".join(f"`{kind}`" for kind in card["model_types"])
    return "\n".join([f"### {card['family']}", "", f"`model_type` {kinds}.", "", *head, *rows])


def _plain(text: str) -> str:
    """Return text that cannot end a cell."""
    return text.replace("|", "/").replace("`", "'")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _head(titles: Sequence[str]) -> list[str]:
    return [_row(titles), "|" + "---|" * len(titles)]
