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
from megavlm.programs.preview.collect import PackedSegment, PreviewContent, Shown, Stretch

_MOST_BARS = 64  # sequences that are drawn
_MOST_SKIPPED = 5  # examples that are listed for each reason
_FIRST_FRAMES, _FRAME = 12, 320  # frames of a video that are shown at first; pixels of a frame's longer side


def page(content: PreviewContent) -> str:
    """Return the HTML of the page, in which text from the data is escaped."""
    body = [
        f"<header><h1>{escape(content.title)}</h1>{_facts(content)}</header>",
        *(f'<p class="warning">{escape(text)}</p>' for text in content.warnings),
        '<div class="columns">',
        section("Sources", _sources(content)),
        section("Skipped", _skipped(content)),
        section("Tokens of a sample", quantiles([segment.length for segment in content.segments])),
        section("Images of a sample", quantiles([segment.images for segment in content.segments])),
        "</div>",
        section("Sequences", _sequences(content)),
        section("Samples", _legend() + "".join(_sample(shown, content) for shown in content.shown)),
    ]
    return document(content.title, body)


def quantiles(values: Sequence[int]) -> str:
    """Return how values are distributed: the smallest, quartiles, the largest, and their sum."""
    if not values:
        return '<p class="quiet">No values.</p>'
    shares = {"smallest": 0, "a quarter up to": 25, "half up to": 50, "three quarters up to": 75, "largest": 100}
    places = np.percentile(values, list(shares.values()), method="lower")
    return facts(
        [*((name, f"{value:,}") for name, value in zip(shares, places, strict=True)), ("sum", f"{sum(values):,}")]
    )


def _facts(content: PreviewContent) -> str:
    counted = (
        ("samples looked at", f"{content.read:,}"),
        ("sequences", f"{len(content.sequences):,} of {content.seq_length:,} tokens"),
        ("positions filled", f"{content.efficiency:.2%}"),
    )
    return facts((*counted, *content.facts))


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


def _sequences(content: PreviewContent) -> str:
    def segment(found: PackedSegment) -> str:
        tip = escape(f"{found.label}: {found.length} tokens, {found.images} images", quote=True)
        width = found.length / content.seq_length
        return f'<i style="width:{width:.4%};background:{_colour(found.source)}" title="{tip}"></i>'

    rows = [
        f'<li><span class="number">{number}</span><div class="sequence">{"".join(map(segment, sequence))}</div></li>'
        for number, sequence in enumerate(content.sequences[:_MOST_BARS])
    ]
    about = (
        '<p class="quiet">Each bar is a sequence. Its parts are samples in the colour of their source; samples do not '
        "attend to each other. Hatched parts are padding.</p>"
    )
    left = len(content.sequences) - len(rows)
    more = f'<p class="quiet">{left:,} more are not drawn.</p>' if left > 0 else ""
    return f'{about}<ol class="sequences">{"".join(rows)}</ol>{more}'


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
    first, rest = "".join(frames[:_FIRST_FRAMES]), frames[_FIRST_FRAMES:]
    film = f'<div class="film">{first}</div>'
    if rest:
        more = f"<summary>{len(rest):,} more frames, to {seconds[-1]:.2f} s</summary>"
        film += f'<details>{more}<div class="film">{"".join(rest)}</div></details>'
    height, width = pictures[0].shape[:2]
    about = f"video: {len(frames):,} frames of {height}×{width} pixels"
    return f'<div class="video"><p class="quiet">{about}</p>{film}</div>'


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
