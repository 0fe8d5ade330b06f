"""Put the parts of a page together: HTML that needs no script, font, other file or network."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from megavlm.preview.style import STYLE


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
