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

from megavlm.config.messages import several
from megavlm.html import COLOURS, document, facts, picture, section
from megavlm.programs.preview.collect import PackedSegment, PreviewContent, Shown, Stretch

_WIDTH, _HEIGHT = 520, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 8, 12, 34
_MOST_BINS = 32


def bins_of(values: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (first, last, count) of bins that cover all values; each is 1, 2 or 5 times a power of ten wide."""
    low, high = min(values), max(values)
    width = next(step for step in _round_numbers() if (high // step - low // step + 1) <= _MOST_BINS)
    first = low // width
    counts = [0] * (high // width - first + 1)
    for value in values:
        counts[value // width - first] += 1
    return [((first + place) * width, (first + place + 1) * width - 1, count) for place, count in enumerate(counts)]


def histogram(values: Sequence[int], *, what: str, of: str) -> str:
    """Return a histogram as SVG, or a sentence if all values are the same.

    `what` names one of what the axis has (a token), `of` one of the things that are counted (a sample).
    """
    if not values:
        return '<p class="quiet">No values.</p>'
    if min(values) == max(values):
        return f'<p class="quiet">{escape(several(values[0], what))} in each of {escape(several(len(values), of))}.</p>'
    bins = bins_of(values)
    tallest = max(count for _, _, count in bins)
    step = (_WIDTH - _LEFT - _RIGHT) / len(bins)
    floor = _HEIGHT - _BOTTOM
    drawn = []
    for level in sorted({tallest, tallest // 2} - {0}):
        y = floor - (floor - _TOP) * level / tallest
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{level}</text>')
    labelled = max(1, round(len(bins) / 8))
    for place, (first, last, count) in enumerate(bins):
        x, height = _LEFT + place * step, (floor - _TOP) * count / tallest
        range_ = f"{first}" if first == last else f"{first} to {last}"
        tip = escape(f"{range_} {what}s: {several(count, of)}")
        drawn.append(
            f'<rect class="bar" x="{x + 1:.1f}" y="{floor - height:.1f}" width="{max(1.0, step - 2):.1f}" '
            f'height="{height:.1f}" rx="2"><title>{tip}</title></rect>'
        )
        if place % labelled == 0:
            middle = x + step / 2
            drawn.append(f'<text class="tick" x="{middle:.1f}" y="{floor + 14}" text-anchor="middle">{first}</text>')
    drawn.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>')
    axis = f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">{escape(what)}s</text>'
    label = escape(f"{of}s by {what}s")
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(drawn)}{axis}</svg>'


def _round_numbers() -> list[int]:
    return [digit * 10**power for power in range(12) for digit in (1, 2, 5)]


_FIRST_BARS, _MOST_BARS = 24, 512  # sequences that are drawn at first, and after a click on "more"
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
        section("Lengths", histogram([s.length for s in content.segments], what="token", of="sample")),
        section("Images", histogram([s.images for s in content.segments], what="image", of="sample")),
        "</div>",
        section("Sequences", _sequences(content)),
        section("Samples", _legend() + "".join(_sample(shown, content) for shown in content.shown)),
    ]
    return document(content.title, body)


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
    rows = []
    for number, source in enumerate(content.sources):
        share = source.drawn / total
        records = "stream" if source.records is None else f"{source.records:,}"
        rows.append(
            f'<tr><td><i class="dot" style="background:{_colour(number)}"></i>{escape(source.name)}</td>'
            f'<td class="number">{records}</td><td class="number">{source.share:.1%}</td>'
            f'<td class="number">{share:.1%}</td><td class="wide"><div class="share">'
            f'<i style="width:{share:.2%};background:{_colour(number)}"></i></div></td></tr>'
        )
    head = '<tr><th>source</th><th class="number">records</th><th class="number">share</th>'
    return f'<table>{head}<th class="number">drawn</th><th></th></tr>{"".join(rows)}</table>'


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
    listed = f'{about}<ol class="sequences">{"".join(rows[:_FIRST_BARS])}</ol>'
    if len(rows) > _FIRST_BARS:
        left = len(content.sequences) - len(rows)
        told = f"{len(rows) - _FIRST_BARS:,} more" + (f"; {left:,} others are not drawn" if left else "")
        rest = f'<ol class="sequences">{"".join(rows[_FIRST_BARS:])}</ol>'
        listed += f"<details><summary>{told}</summary>{rest}</details>"
    return listed


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
