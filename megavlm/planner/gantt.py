"""A step's timeline as one self-contained page (SVG, no scripts, nothing loaded) or as PNG."""

from __future__ import annotations

from html import escape
from pathlib import Path

from megavlm.planner.orders import BACKWARD, FORWARD, WEIGHT
from megavlm.planner.timeline import Event, Timeline

WIDTH, LEFT, ROW, GAP = 1400, 70, 34, 6
COLOURS = {FORWARD: ("#3b82f6", "#93c5fd"), BACKWARD: ("#15803d", "#86efac"), WEIGHT: ("#b45309", "#fcd34d")}
NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weights"}


def colour(event: Event, ranks: int) -> str:
    """Chunks of one rank alternate between a dark and a light shade."""
    return COLOURS[event.step.kind][event.step.chunk // ranks % 2]


def rectangles(timeline: Timeline) -> list[tuple[float, float, float, Event]]:
    """(left, top, width, event) of each pass, in pixels."""
    scale = (WIDTH - LEFT - 10) / timeline.seconds
    return [
        (LEFT + e.start * scale, 40 + e.rank * (ROW + GAP), max(0.5, (e.end - e.start) * scale), e)
        for e in timeline.events
    ]


def height(timeline: Timeline) -> int:
    return 40 + len(timeline.busy) * (ROW + GAP) + 30


def html(timeline: Timeline, title: str) -> str:
    """The page. Hovering a pass tells its chunk, micro-batch and time."""
    ranks = len(timeline.busy)
    shapes = []
    for left, top, width, event in rectangles(timeline):
        step = event.step
        took = (event.end - event.start) * 1e3
        note = f"{NAMES[step.kind]} of micro-batch {step.micro}, chunk {step.chunk}: {took:.2f} ms"
        label = f"<text x='{left + width / 2:.1f}' y='{top + 22:.1f}'>{step.micro}</text>" if width > 16 else ""
        shapes.append(
            f"<g><rect x='{left:.2f}' y='{top}' width='{width:.2f}' height='{ROW}' fill='{colour(event, ranks)}'/>"
            f"{label}<title>{escape(note)}</title></g>"
        )
    labels = [
        f"<text class='rank' x='4' y='{40 + rank * (ROW + GAP) + 22}'>rank {rank}</text>" for rank in range(ranks)
    ]
    legend = " ".join(f"<span style='color:{COLOURS[kind][0]}'>■ {NAMES[kind]}</span>" for kind in NAMES)
    summary = f"{timeline.seconds * 1e3:.1f} ms, bubble {timeline.bubble:.1%}; numbers are micro-batches"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<style>body{{font:14px sans-serif;margin:16px}}svg{{background:#f3f4f6}}text{{font-size:11px;text-anchor:middle}}
text.rank{{text-anchor:start;font-size:13px}}rect{{stroke:#fff;stroke-width:.5}}</style></head>
<body><h1 style="font-size:18px">{escape(title)}</h1><p>{summary} {legend}</p>
<svg viewBox="0 0 {WIDTH} {height(timeline)}" width="100%">{"".join(labels)}{"".join(shapes)}</svg></body></html>
"""


def png(timeline: Timeline, path: Path) -> None:
    """The same picture, for places that show no pages."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (WIDTH, height(timeline)), "#ffffff")
    draw = ImageDraw.Draw(picture)
    for rank in range(len(timeline.busy)):
        row = 40 + rank * (ROW + GAP)
        draw.rectangle((LEFT, row, WIDTH - 10, row + ROW), fill="#f3f4f6")
        draw.text((4, row + 10), f"rank {rank}", fill="#000000")
    for left, top, width, event in rectangles(timeline):
        draw.rectangle((left, top, left + width, top + ROW), fill=colour(event, len(timeline.busy)), outline="#ffffff")
        if width > 16:
            draw.text((left + width / 2 - 5, top + 10), str(event.step.micro), fill="#000000")
    draw.text((LEFT, 12), f"{timeline.seconds * 1e3:.1f} ms, bubble {timeline.bubble:.1%}", fill="#000000")
    picture.save(path)
