"""Build HTML pages that need no script, font, other file or network, for light and dark screens."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from html import escape
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_QUALITY = 80  # of a JPEG
_TINY = 128  # pixels of the longer side up to which a picture is a PNG, which browsers enlarge without blurring
_COLOURS = 12  # --source-0 and so on of page.css


def colour(place: int) -> str:
    """Return the CSS colour number `place` of the page's palette."""
    return f"var(--source-{place % _COLOURS})"


def dot(place: int) -> str:
    """Return a dot in colour number `place` of the page's palette."""
    return f'<i class="dot" style="background:{colour(place)}"></i>'


def document(title: str, body: Iterable[str]) -> str:
    """Return a page; `body` is HTML, `title` is text."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body><main>\n"
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


def picture(pixels: NDArray[np.uint8], *, side: int) -> str:
    """Return an image [height, width, 3] as an <img> with embedded bytes, reduced to `side` pixels at most."""
    height, width = pixels.shape[:2]
    image = Image.fromarray(pixels)
    image.thumbnail((side, side))
    kind = "png" if max(image.size) <= _TINY else "jpeg"
    file = BytesIO()
    image.save(file, format=kind, **({"quality": _QUALITY} if kind == "jpeg" else {}))
    data = b64encode(file.getvalue()).decode("ascii")
    sides = f'width="{image.width}" height="{image.height}"'
    return f'<img {sides} alt="{height}×{width} pixels" src="data:image/{kind};base64,{data}">'
