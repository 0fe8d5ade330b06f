"""Write what a preview found as one HTML page that needs no script, font, other file or network."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from html import escape
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megavlm.html import COLOURS, document, facts, picture, section, table
from megavlm.programs.preview.collect import PreviewContent, Shown, Stretch

_MOST_SKIPPED = 5  # examples that are listed for each reason
_FRAME = 320  # pixels of the longer side of a frame of a video


def page(content: PreviewContent) -> str:
    """Return the HTML of the page, in which text from the data is escaped."""
    about = facts((("samples looked at", f"{content.read:,}"), *content.facts))
    body = [
        f"<header><h1>{escape(content.title)}</h1>{about}</header>",
        *(f'<p class="warning">{escape(text)}</p>' for text in content.warnings),
        '<div class="columns">',
        section("Sources", _sources(content)),
        section("Skipped", _skipped(content)),
        "</div>",
        section("Samples", _legend() + "".join(_sample(shown, content) for shown in content.shown)),
    ]
    return document(content.title, body)


def _colour(source: int) -> str:
    return f"var(--source-{source % COLOURS})"


def _sources(content: PreviewContent) -> str:
    total = sum(source.drawn for source in content.sources) or 1
    rows = (
        (
            f'<i class="dot" style="background:{_colour(number)}"></i>{escape(source.name)}',
            "stream" if source.records is None else f"{source.records:,}",
            f"{source.share:.1%}",
            f"{source.drawn / total:.1%}",
        )
        for number, source in enumerate(content.sources)
    )
    return table(("source", "records", "share", "drawn"), rows, numbers=(1, 2, 3))


def _skipped(content: PreviewContent) -> str:
    if not content.skipped:
        return f'<p class="quiet">Nothing: all {content.read:,} samples can be used.</p>'
    whole = sum(not skip.partly for skip in content.skipped)
    parts = [f"<p>{whole:,} of {content.read:,} samples ({whole / max(content.read, 1):.1%}).</p>"]
    counts = Counter((str(skip.reason), skip.partly) for skip in content.skipped)
    for (reason, partly), count in counts.most_common():
        examples = [skip for skip in content.skipped if (str(skip.reason), skip.partly) == (reason, partly)]
        listed = "".join(
            f"<li><b>{escape(skip.label)}</b> {escape(skip.detail)}</li>" for skip in examples[:_MOST_SKIPPED]
        )
        note = " <span>in part</span>" if partly else ""
        parts.append(f"<details><summary><b>{count:,}</b> {escape(reason)}{note}</summary><ul>{listed}</ul></details>")
    return "".join(parts)


def _legend() -> str:
    return (
        '<p class="quiet"><mark>Trained</mark> tokens have a loss; the others are context. '
        '<span class="image">image</span> stands for image tokens, <span class="image">video</span> for those of a '
        "video.</p>"
    )


def _sample(shown: Shown, content: PreviewContent) -> str:
    name = content.sources[shown.source].name if shown.source < len(content.sources) else ""
    trained = sum(len(stretch.text) for stretch in shown.stretches if stretch.trained)
    images = "".join(map(_tiles, shown.images, shown.seconds))
    text = "".join(map(_stretch, shown.stretches))
    nothing = "" if trained else ' <span class="warning">nothing is trained</span>'
    return (
        f'<article><h3><i class="dot" style="background:{_colour(shown.source)}"></i>{escape(shown.label)} '
        f"<span>{escape(name)} · {shown.length:,} tokens</span>{nothing}</h3>"
        f'{f"<div class=images>{images}</div>" if images else ""}<div class="text">{text}</div></article>'
    )


def _tiles(pictures: Sequence[NDArray[np.uint8]], seconds: Sequence[float]) -> str:
    """Return the pictures of an image, or the frames of a video with their times."""
    if not seconds:
        return f'<div class="tiles">{"".join(map(_picture, pictures))}</div>'
    frames = [
        f"<figure>{picture(pixels, side=_FRAME)}<figcaption>{second:.2f} s</figcaption></figure>"
        for pixels, second in zip(pictures, seconds, strict=True)
    ]
    height, width = pictures[0].shape[:2]
    about = f"video: {len(frames):,} frames of {height}×{width} pixels"
    return f'<div class="video"><p class="quiet">{about}</p><div class="film">{"".join(frames)}</div></div>'


def _stretch(stretch: Stretch) -> str:
    if stretch.image:
        return f'<span class="image">{"video" if stretch.video else "image"} × {escape(stretch.text)}</span>'
    return f"<mark>{escape(stretch.text)}</mark>" if stretch.trained else escape(stretch.text)


def _picture(pixels: NDArray[np.uint8]) -> str:
    file = BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    height, width = pixels.shape[:2]
    data = b64encode(file.getvalue()).decode("ascii")
    return f'<img width="{width}" height="{height}" alt="{height}×{width} pixels" src="data:image/png;base64,{data}">'
