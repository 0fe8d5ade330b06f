"""Put the parts of a page together, and write it: HTML that needs no script, font, other file or network."""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape
from pathlib import Path

from megavlm.errors import UserError
from megavlm.preview.style import STYLE


def write_page(text: str, out: Path) -> None:
    """Write a page, whole or not at all. Raises UserError, which names --out, if the file cannot be written."""
    try:
        replace_page(text, out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}") from error


def replace_page(text: str, out: Path) -> None:
    """Write a page, whole or not at all, whether there is an older one or not. Raises OSError."""
    temporary = out.with_name(out.name + ".tmp")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(text, encoding="utf-8", errors="replace")
    os.replace(temporary, out)


def document(title: str, body: Iterable[str]) -> str:
    """Return a page; `body` is HTML, `title` is text."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def section(title: str, inner: str) -> str:
    """Return a section; `inner` is HTML, `title` is text."""
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a row of names and values."""
    rows = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f"<dl>{''.join(rows)}</dl>"


def table(head: Iterable[str], rows: Iterable[Iterable[str]], *, numbers: Iterable[int] = ()) -> str:
    """Return a table of HTML cells; the columns in `numbers` are aligned to the right."""
    right = set(numbers)

    def line(cells: Iterable[str], tag: str) -> str:
        drawn = (
            f"<{tag}{' class=number' if place in right else ''}>{cell}</{tag}>" for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(drawn)}</tr>"

    return f'<div class="scroll"><table>{line(head, "th")}{"".join(line(row, "td") for row in rows)}</table></div>'
