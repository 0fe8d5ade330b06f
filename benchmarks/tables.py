"""Put a table that a script makes into a document, between two marks."""

from __future__ import annotations

_END = "<!-- end -->"


def with_table(text: str, script: str, table: str) -> str:
    """Return the document with `table` between `<!-- SCRIPT -->` and `<!-- end -->`."""
    begin = f"<!-- {script} -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(_END)
    return f"{head}{begin}\n{table}\n{_END}{tail}"
