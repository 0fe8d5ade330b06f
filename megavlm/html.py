"""Put pages together: HTML that needs no script, font, other file or network, for light and dark screens."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from html import escape
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_QUALITY = 80  # of a JPEG
_TINY = 128  # pixels of the longer side up to which a picture is a PNG, which browsers enlarge without blurring
# The colours also differ in lightness, for readers who see fewer hues.
_LIGHT = (
    *("#2f6fb3", "#d9822b", "#3f8f5f", "#a64d79", "#7a6bb8", "#8c7a3d"),
    *("#4c9aa8", "#b5483a", "#c7a21c", "#8a5a44", "#56606e", "#d58fbe"),
)
_DARK = (
    *("#6ea8e0", "#f0a860", "#7cc79a", "#dc8fb5", "#b3a6ea", "#cdb975"),
    *("#86ccd8", "#e88a7d", "#e6cf5a", "#c79a80", "#a3aebc", "#f0bfdf"),
)
COLOURS = len(_LIGHT)


def _sources(colours: tuple[str, ...]) -> str:
    return "".join(f"--source-{number}:{colour};" for number, colour in enumerate(colours))


STYLE = (
    (
        ":root{color-scheme:light dark;--paper:#f6f5f2;--card:#fff;--ink:#1d1f23;--quiet:#666b73;--line:#dedcd6;"
        "--trained:#d4eeda;--trained-ink:#12381f;--trained-line:#3f8f5f;--image:#e4e9f2;--image-ink:#33445e;--warn:#a33a1e;"
        + _sources(_LIGHT)
        + "}@media(prefers-color-scheme:dark){:root{--paper:#16181c;--card:#1f2227;--ink:#e6e4df;--quiet:#9aa0a9;"
        "--line:#353a42;--trained:#1d3f2b;--trained-ink:#d3f2dd;--trained-line:#7cc79a;--image:#2a3342;--image-ink:#b9c8e2;"
        "--warn:#f0a080;" + _sources(_DARK) + "}}"
    )
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:24px;margin:0 0 14px;overflow-wrap:anywhere}
h2{font-size:16px;margin:0 0 10px}
h3{font-size:14px;margin:0 0 10px;overflow-wrap:anywhere}
h3 span,summary span{color:var(--quiet);font-weight:normal}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px;margin:0 0 16px;
  min-width:0}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:16px;margin-bottom:16px}
.columns section{margin:0}
dl{display:flex;flex-wrap:wrap;gap:8px 28px;margin:0 0 20px}
dt{color:var(--quiet);font-size:12px}
dd{margin:0;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
table{width:100%;border-collapse:collapse;font-variant-numeric:tabular-nums}
th{font-weight:normal;color:var(--quiet);font-size:12px;text-align:left}
th,td{padding:4px 10px 4px 0;border-bottom:1px solid var(--line)}
tr:last-child td{border:0}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.dot{display:inline-block;width:10px;height:10px;border-radius:50%;margin-right:8px}
.quiet{color:var(--quiet);margin:0 0 10px}
.warning{color:var(--warn);font-weight:600}
details{border-top:1px solid var(--line);padding:6px 0}
summary{cursor:pointer}
details ul{margin:6px 0;padding-left:18px;font-size:13px;color:var(--quiet);overflow-wrap:anywhere}
details b{color:var(--ink)}
svg{width:100%;height:auto;display:block}
svg .grid{stroke:var(--line)}
.scroll{overflow-x:auto}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));gap:18px 26px;margin:0 0 12px}
figure{margin:0;min-width:0}
figcaption{font-size:13px;margin:0 0 8px}
.plot{position:relative;height:190px;margin:0 6px 24px 52px}
.plot svg{width:100%;height:100%;overflow:visible}
.plot span{position:absolute;font-size:11px;color:var(--quiet);white-space:nowrap;font-variant-numeric:tabular-nums}
.plot .y{right:100%;margin-right:7px;transform:translateY(-50%)}
.plot .x{top:100%;margin-top:5px;transform:translateX(-50%)}
.plot svg .run{fill:none;stroke-width:1.6;vector-effect:non-scaling-stroke}
.plot svg .grid{vector-effect:non-scaling-stroke}
td>small{min-width:150px}
.across{font-size:12px;color:var(--quiet);text-align:right;margin:-4px 6px 0 0}
small{display:block;margin-left:18px;font-size:12px;color:var(--quiet)}
article{border-top:1px solid var(--line);padding:16px 0}
.images{display:flex;align-items:flex-start;flex-wrap:wrap;gap:14px;margin:0 0 12px}
.tiles{display:flex;align-items:flex-start;flex-wrap:wrap;gap:3px;max-width:100%}
.tiles img{max-width:min(100%,360px);height:auto;min-width:48px;border-radius:3px;outline:1px solid var(--line);
  image-rendering:auto}
.video{width:100%}
.video p{margin:0 0 4px;font-size:12px}
.film{display:grid;grid-template-columns:repeat(auto-fill,minmax(96px,1fr));gap:6px;margin:0 0 6px}
.film img{width:100%;height:auto;border-radius:3px;outline:1px solid var(--line)}
.film figcaption{margin:2px 0 0;color:var(--quiet);font-size:12px;font-variant-numeric:tabular-nums}
.text{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.65 ui-monospace,"DejaVu Sans Mono",monospace}
mark{background:var(--trained);color:var(--trained-ink);border-bottom:2px solid var(--trained-line);border-radius:2px;
  -webkit-box-decoration-break:clone;box-decoration-break:clone}
mark.wrong{background:none;color:var(--warn);border-color:var(--warn)}
.image{background:var(--image);color:var(--image-ink);border-radius:8px;padding:0 7px;font-size:12px}
.asked{display:grid;grid-template-columns:minmax(0,260px) minmax(0,1fr);gap:6px 22px;align-items:start}
.asked.blind{grid-template-columns:minmax(0,1fr)}
.asked h2,.said div{white-space:pre-wrap;overflow-wrap:anywhere;max-height:18em;overflow:auto}
.asked h2{margin:0 0 4px}
.asked h2.long{font-size:15px;font-weight:normal}
.asked .images{margin:0;gap:8px}
.asked img{width:100%;height:auto;max-height:420px;object-fit:contain;object-position:left top;border-radius:4px;
  image-rendering:auto}
.asked img[src^="data:image/png"]{image-rendering:pixelated}
.asked .images img:not(:only-child){width:calc(50% - 4px)}
.said{list-style:none;margin:0;padding:0}
.said li{display:grid;grid-template-columns:104px minmax(0,1fr);gap:12px;padding:6px 0;border-top:1px solid var(--line)}
.said b{font-weight:normal;color:var(--quiet);font-size:13px;font-variant-numeric:tabular-nums}
.said b span{color:var(--trained-line);font-weight:700}
.said .right div{font-weight:600}
.said .quiet{margin:0}
@media(max-width:640px){.asked{grid-template-columns:minmax(0,1fr)}
  .asked img{max-height:240px;width:auto;max-width:100%}
  .asked img[src^="data:image/png"]{width:100%}
  .said li{grid-template-columns:84px minmax(0,1fr);gap:8px}}
@media print{section{break-inside:avoid}}
"""
)


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


def picture(pixels: NDArray[np.uint8], *, side: int) -> str:
    """Return an image [height, width, 3] as an <img> that holds its bytes, reduced to `side` pixels at most."""
    height, width = pixels.shape[:2]
    image = Image.fromarray(pixels)
    image.thumbnail((side, side))
    kind = "png" if max(image.size) <= _TINY else "jpeg"
    file = BytesIO()
    image.save(file, format=kind, **({"quality": _QUALITY} if kind == "jpeg" else {}))
    data = b64encode(file.getvalue()).decode("ascii")
    sides = f'width="{image.width}" height="{image.height}"'
    return f'<img {sides} alt="{height}×{width} pixels" src="data:image/{kind};base64,{data}">'
