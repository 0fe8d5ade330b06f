"""A pipeline step as a picture: one row per rank, one bar per pass, as a page of its own or as PNG."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape

from megavlm.arch.schedules import BACKWARD, FORWARD, WEIGHT
from megavlm.arch.timeline import Event, Timeline

# The layers of a chunk, and the colours of its bars by what they do.
PARTS = ("language", "vision", "vision and language")
_COLOURS: Mapping[str, tuple[str, str, str]] = {
    FORWARD: ("#3b76c4", "#8a63c9", "#5f6cc6"),
    BACKWARD: ("#3f9a6b", "#c07a2c", "#7f8a4c"),
    WEIGHT: ("#9bc9ae", "#e3bd8d", "#bfc39e"),
}
_WORDS = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "backward of weights"}
_ROW, _GAP, _LEFT, _WIDTH, _AXIS = 26, 6, 58, 1400, 26
_NARROWEST_NUMBER = 15.0  # a bar that is narrower has no room for its micro-batch

_STYLE = """
:root { color-scheme: light dark; --ink: #1d1f23; --soft: #666a73; --paper: #fff; --idle: #eef0f3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaee; --soft: #9aa0ab; --paper: #16181c; --idle: #24272e; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem; }
h1 { font-size: 1.3rem; margin: 0 0 .2rem; } p { color: var(--soft); margin: .2rem 0 1rem; }
svg { width: 100%; min-width: 900px; height: auto; } .scroll { overflow-x: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); } svg .in { fill: #fff; text-anchor: middle; }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin: 0 .35rem 0 1rem; }
"""


@dataclass(frozen=True)
class _Bar:
    x: float
    y: float
    width: float
    colour: str
    number: str
    title: str


def html(timeline: Timeline, *, title: str, part_of_chunk: Callable[[int], str] = lambda chunk: "language") -> str:
    """One HTML page without anything from elsewhere; bars say what they are when they are pointed at.

    Args:
        timeline: with its events (`simulate(…, keep_events=True)`).
        part_of_chunk: which of `PARTS` the layers of a chunk are.
    """
    bars, height = _bars(timeline, part_of_chunk), _height(timeline)
    rows = [
        f'<rect x="{_LEFT}" y="{_y(rank)}" width="{_WIDTH}" height="{_ROW}" rx="3" fill="var(--idle)"/>'
        f'<text x="0" y="{_y(rank) + 17}">rank {rank}</text>'
        for rank in range(len(timeline.busy))
    ]
    drawn = [
        f'<g><title>{escape(bar.title)}</title><rect x="{bar.x:.2f}" y="{bar.y}" width="{bar.width:.2f}" '
        f'height="{_ROW}" rx="2" fill="{bar.colour}" stroke="var(--paper)" stroke-width=".6"/>'
        + (
            f'<text class="in" x="{bar.x + bar.width / 2:.2f}" y="{bar.y + 17}">{bar.number}</text>'
            if bar.number
            else ""
        )
        + "</g>"
        for bar in bars
    ]
    marks = [
        f'<text x="{_LEFT + _WIDTH * tick / 4:.1f}" y="{height - 6}" text-anchor="{anchor}">'
        f"{_time(timeline.seconds * tick / 4)}</text>"
        for tick, anchor in enumerate(("start", "middle", "middle", "middle", "end"))
    ]
    svg = "\n".join([*rows, *drawn, *marks])
    there = {part_of_chunk(event.step.chunk) for event in timeline.events}
    keys = "".join(
        f'<span class="key" style="background:{colour}"></span>{part} {_WORDS[kind]}'
        for kind in dict.fromkeys(event.step.kind for event in timeline.events)
        for part, colour in zip(PARTS, _COLOURS[kind], strict=True)
        if part in there
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n<p>{_summary(timeline)}</p>\n"
        f'<div class="scroll"><svg viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" role="img">\n{svg}\n</svg></div>\n'
        f"<p>{keys}</p>\n<p>Without pipeline stages, the first pass on a GPU takes as long as its host needs to launch "
        "its kernels; in later ones the host is ahead.</p></body></html>\n"
    )


def png(timeline: Timeline, *, title: str, part_of_chunk: Callable[[int], str] = lambda chunk: "language") -> bytes:
    """Return the same as a PNG."""
    from PIL import Image, ImageDraw

    top = 46
    image = Image.new("RGB", (_LEFT + _WIDTH + 20, top + _height(timeline)), "white")
    draw = ImageDraw.Draw(image)
    draw.text((0, 0), title, fill="#1d1f23", font_size=17)
    draw.text((0, 23), _summary(timeline), fill="#666a73", font_size=13)
    for rank in range(len(timeline.busy)):
        y = top + _y(rank)
        draw.rectangle((_LEFT, y, _LEFT + _WIDTH, y + _ROW), fill="#eef0f3")
        draw.text((0, y + 6), f"rank {rank}", fill="#666a73", font_size=12)
    for bar in _bars(timeline, part_of_chunk):
        box = (bar.x, top + bar.y, bar.x + bar.width, top + bar.y + _ROW)
        draw.rectangle(box, fill=bar.colour, outline="white")
        if bar.number:
            middle = (bar.x + bar.width / 2, top + bar.y + _ROW / 2)
            draw.text(middle, bar.number, fill="white", anchor="mm", font_size=11)
    for tick, anchor in enumerate(("lm", "mm", "mm", "mm", "rm")):
        place = (_LEFT + _WIDTH * tick / 4, top + _height(timeline) - 12)
        draw.text(place, _time(timeline.seconds * tick / 4), fill="#666a73", anchor=anchor, font_size=11)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _bars(timeline: Timeline, part_of_chunk: Callable[[int], str]) -> list[_Bar]:
    assert timeline.events, "the events of this timeline were not kept"
    scale = _WIDTH / timeline.seconds
    taking_time = (event for event in timeline.events if event.end > event.start)
    return [_bar(event, scale, part=part_of_chunk(event.step.chunk)) for event in taking_time]


def _bar(event: Event, scale: float, *, part: str) -> _Bar:
    step, width = event.step, (event.end - event.start) * scale
    return _Bar(
        x=_LEFT + event.start * scale,
        y=_y(event.rank),
        width=width,
        colour=_COLOURS[step.kind][PARTS.index(part)],
        number=str(step.micro + 1) if width >= _NARROWEST_NUMBER else "",
        title=f"{_WORDS[step.kind]} of micro-batch {step.micro + 1}, chunk {step.chunk} ({part}): "
        f"{_time(event.start)} to {_time(event.end)}",
    )


def _summary(timeline: Timeline) -> str:
    return f"{_time(timeline.seconds)} a step, of which ranks are idle {timeline.bubble:.1%}; numbers are micro-batches"


def _y(rank: int) -> int:
    return rank * (_ROW + _GAP)


def _height(timeline: Timeline) -> int:
    return _y(len(timeline.busy)) + _AXIS


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
