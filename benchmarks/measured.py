"""Write the tables of docs/reports/measured.md from the records, or run the commands of its rows again.

    python benchmarks/measured.py                             # print the table
    python benchmarks/measured.py --write                     # renew it in docs/reports/measured.md
    python benchmarks/measured.py --repeat 5 --only convert   # run `convert.py` five times, then print the table

A figure is the median of its records. Its spread is the smallest and the largest of them. Rows are listed in
`measured_rows.py`; a benchmark appends a line to `records/` each time it runs, and no line is ever removed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from measured_rows import ROWS, Row
from tables import with_table

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "reports" / "measured.md"
# Other work on two cores decides what the clock shows from about this load average on.
BUSY = 3.0


def records(name: str) -> list[dict[str, Any]]:
    """Return the records of a benchmark, oldest first."""
    path = HERE / "records" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def samples(row: Row, found: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Return the records that have the row's figure, with the figure.

    Where time by the clock is measured, records of a busy machine are left out, unless there are no others.
    """
    have = [
        (record, value) for record in found if record["date"] >= row.since and (value := row.value(record)) is not None
    ]
    quiet = [pair for pair in have if pair[0]["load_average_before"] < BUSY]
    return quiet or have if row.by_the_clock else have


def line(row: Row, found: Sequence[tuple[dict[str, Any], float]], machines: Sequence[str]) -> str:
    """Return the row of the table."""
    values = [value for _, value in found]

    def shown(value: float) -> str:
        return row.form.format(value).replace("%", " %")

    runs = "one run" if len(values) == 1 else f"{len(values)} runs"
    low, high = (re.sub(r"[^\d.]+$", "", shown(bound(values))) for bound in (min, max))
    spread = f" ({low} to {high})" if low != high else ""
    loads = [record["load_average_before"] for record, _ in found]
    load = f"{min(loads):.1f}" if len(loads) == 1 else f"{min(loads):.1f}–{max(loads):.1f}"
    busy = ", **busy**" if row.by_the_clock and max(loads) >= BUSY else ""
    used = "".join(sorted({_letter(machines.index(machine(record))) for record, _ in found}))
    made = f"{runs}, {found[-1][0]['date'][:10]}, {used} {load}{busy}"
    return f"| {row.what} | {shown(statistics.median(values))}{spread} | {made} |"


def once(lines: Iterable[str]) -> Iterator[str]:
    """Yield rows of the table; the last cell is empty where it is that of the row above."""
    above = ""
    for each in lines:
        start, _, last = each.rpartition(" | ")
        yield f"{start} | |" if last == above else each
        above = last


def machine(record: dict[str, Any]) -> str:
    """Return the machine of a record: a GPU that was used, the processor, and the versions of Python and packages."""
    gpu = record["machine"]["device"] + ", " if isinstance(record.get("machine"), dict) else ""
    versions = [f"{name} {record[name]}" for name in ("torch", "megatron-core", "transformers")]
    return f"{gpu}{record['cpu']}, {record['cores']} cores, Python {record['python']}, {', '.join(versions)}"


def table() -> str:
    """Return the table, with a line for each command, and the list of machines, in Markdown."""
    found = [(row, samples(row, records(row.record))) for row in ROWS]
    machines = list(dict.fromkeys(machine(record) for _, pairs in found for record, _ in pairs))
    lines = ["| what | median (spread) | runs, last, machine and load |", "|---" * 3 + "|"]
    for command in dict.fromkeys(row.command for row, _ in found):
        lines.append(f"| **`{command}`** |")
        lines += once(line(row, pairs, machines) for row, pairs in found if row.command == command)
    listed = [f"- {_letter(number)}: {name}" for number, name in enumerate(machines)]
    return "\n".join([*lines, "", "Machines:", "", *listed])


def documented(text: str) -> str:
    """Return the document with today's table."""
    return with_table(text, "benchmarks/measured.py", table())


def repeat(times: int, only: str) -> None:
    """Run each command that contains `only` as often as asked, one after the other."""
    for command in dict.fromkeys(row.command for row in ROWS if only in row.command):
        for number in range(times):
            print(f"run {number + 1} of {times}: {command}", flush=True)
            subprocess.run(command, shell=True, check=True, cwd=HERE.parent)


def _letter(number: int) -> str:
    return chr(ord("A") + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="Write the table to docs/reports/measured.md, too.")
    parser.add_argument("--repeat", type=int, default=0, metavar="N", help="First run each command N times.")
    parser.add_argument("--only", default="", metavar="TEXT", help="Run only commands that contain TEXT.")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    repeat(arguments.repeat, arguments.only)
    if arguments.write:
        DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
