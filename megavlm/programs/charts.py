"""Draw line charts as SVG, and format durations and large numbers.

Labels of charts are HTML, so that a narrow screen squeezes the lines and not the letters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line of a chart: name, colour in CSS, and points (x, y)."""

    name: str
    colour: str
    points: Sequence[Point]


def duration(seconds: float) -> str:
    """Format seconds with units: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s".replace(".0 ", " ")
    whole = round(seconds)
    units = ((whole // 86_400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
    first = next(place for place, (number, _) in enumerate(units) if number)
    return " ".join(f"{number} {unit}" for number, unit in units[first : first + 2] if number)


def short(number: float) -> str:
    """Format a number in few characters: 0.0002, 1.5, 340, 12k, 3.4M."""
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= unit:
            return f"{number / (1e3 if suffix == 'k' else unit):.4g}{suffix}"
    return f"{number:.4g}"


def thinned(points: Sequence[Point], most: int = 400) -> list[Point]:
    """Return at most `most` points: means of neighbouring points, each at the x of its last point."""
    size = max(-(-len(points) // most), 1)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between `low` and `high` for an axis, at distances of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / 4  # at most twice as many ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(factor * power for factor in (1, 2, 5) if factor * power <= rough)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def chart(
    title: str, lines: Sequence[Line], *, across: str, shown: Callable[[float], str] = short, from_zero: bool = False
) -> str:
    """Return a chart of lines over a common horizontal axis, named `across`, as HTML; "" if no line has points.

    `shown` formats a value; with `from_zero`, the vertical axis includes 0.
    """
    drawn = [Line(line.name, line.colour, thinned(line.points)) for line in lines if line.points]
    if not drawn:
        return ""
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points] + ([0.0] if from_zero else [])
    left, right, bottom, top = min(xs), max(xs), min(ys), max(ys)
    top, right = top + (top == bottom) * (abs(top) or 1.0), right + (right == left)

    def place(x: float, y: float) -> tuple[float, float]:
        return 1000 * (x - left) / (right - left), 1000 * (top - y) / (top - bottom)

    shapes, labels = [], []
    for y in ticks(bottom, top):
        height = place(left, y)[1]
        shapes.append(f'<line class="grid" x1="0" x2="1000" y1="{height:.1f}" y2="{height:.1f}"/>')
        labels.append(f'<span class="y" style="top:{height / 10:.2f}%">{shown(y)}</span>')
    for x in ticks(left, right):
        labels.append(f'<span class="x" style="left:{place(x, top)[0] / 10:.2f}%">{short(x)}</span>')
    for line in drawn:
        places = [place(*point) for point in line.points]
        if len(places) == 1:  # a single value is made a short line
            places.append((places[0][0] + 8, places[0][1]))
        shape = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        tip = f"<title>{escape(line.name)}: {shown(line.points[0][1])} to {shown(line.points[-1][1])}</title>"
        shapes.append(f'<polyline class="run" style="stroke:{line.colour}" points="{shape}">{tip}</polyline>')
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<div class="plot"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)} by {escape(across)}">{"".join(shapes)}</svg>{"".join(labels)}</div>'
        f'<p class="across">{escape(across)}</p></figure>'
    )
