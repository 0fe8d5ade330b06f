"""Draw what a run's time went to, in the colours of the page's style sheet; a narrow screen squeezes time only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_TICKS = tuple(
    number * unit
    for unit, numbers in ((1, (1, 2, 5, 10, 20)), (_MINUTE, (1, 2, 5, 10, 20)), (_HOUR, (1, 2, 4, 8)))
    for number in numbers
) + tuple(number * 10**power * _DAY for power in range(6) for number in (1, 2, 5))
_MOST_TICKS = 6
_WIDTH, _HEIGHT = 520, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 16, 12, 34


@dataclass(frozen=True)
class Part:
    """A part of a whole: its share between 0 and 1, and what a reader who points at it is told."""

    share: float
    colour: str  # of CSS
    tip: str


@dataclass(frozen=True)
class Mark:
    """Something at a moment of the time line; `at` is between 0 (its beginning) and 1."""

    at: float
    sign: str
    tip: str


def duration(seconds: float) -> str:
    """Return seconds in words: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s".replace(".0 ", " ")
    whole = round(seconds)
    units = ((whole // _DAY, "d"), (whole // _HOUR % 24, "h"), (whole // _MINUTE % 60, "min"), (whole % 60, "s"))
    first = next(place for place, (number, _) in enumerate(units) if number)
    return " ".join(f"{number} {unit}" for number, unit in units[first : first + 2] if number)


def ticks_of(seconds: float) -> list[int]:
    """Return at most seven round numbers of seconds from 0 to `seconds`, equally far apart."""
    step = next((step for step in _TICKS if seconds / step <= _MOST_TICKS), _TICKS[-1])
    return list(range(0, int(min(seconds, _MOST_TICKS * step)) + 1, step))


def share_bar(parts: Sequence[Part]) -> str:
    """Return one bar that is divided like the whole."""
    return f'<svg class="whole" viewBox="0 0 1 1" preserveAspectRatio="none">{_column(parts, 0, 1, across=True)}</svg>'


def time_line(columns: Sequence[Sequence[Part]], attempts: Sequence[Part], marks: Sequence[Mark], wall: float) -> str:
    """Return a column for each part of the time, from left to right, with marks above it and attempts below."""
    signs = "".join(
        f'<b style="left:{mark.at:.2%}" title="{escape(mark.tip)}">{escape(mark.sign)}</b>' for mark in marks
    )
    drawn, place = [], 0
    for same, group in groupby(columns, key=lambda column: [(part.share, part.tip) for part in column]):
        alike = list(group)
        if same:
            drawn.append(_column(alike[0], place, len(alike)))
        place += len(alike)
    below = _column(attempts, 0, 1, across=True)
    labels = "".join(
        f'<span style="left:{tick / wall:.2%}">{duration(tick) if tick else "0"}</span>' for tick in ticks_of(wall)
    )
    return (
        f'<div class="marks">{signs}</div>'
        f'<svg class="time" viewBox="0 0 {len(columns)} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="causes over time">{"".join(drawn)}</svg>'
        f'<svg class="attempts" viewBox="0 0 1 1" preserveAspectRatio="none">{below}</svg>'
        f'<div class="ticks">{labels}</div>'
    )


def scaling_chart(points: Sequence[tuple[int, float]], *, limit: float) -> str:
    """Return a line over the numbers of devices: throughput per device against the first, and a line at `limit`."""
    sizes = sorted({size for size, _ in points})
    top = max(1.0, limit, *(share for _, share in points))
    floor = _HEIGHT - _BOTTOM
    step = (_WIDTH - _LEFT - _RIGHT) / max(len(sizes) - 1, 1)

    def x(size: int) -> float:
        return _LEFT + step * sizes.index(size) if len(sizes) > 1 else (_LEFT + _WIDTH - _RIGHT) / 2

    def y(share: float) -> float:
        return floor - (floor - _TOP) * share / top

    drawn = []
    for level in (0.0, 0.5, 1.0):
        drawn.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(level):.1f}" y2="{y(level):.1f}"/>'
        )
        drawn.append(f'<text class="tick" x="{_LEFT - 6}" y="{y(level) + 4:.1f}" text-anchor="end">{level:.0%}</text>')
    drawn.append(
        f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(limit):.1f}" y2="{y(limit):.1f}"/>'
        f'<text class="tick" x="{_LEFT - 6}" y="{y(limit) + 4:.1f}" text-anchor="end">{limit:.0%}</text>'
    )
    path = " ".join(f"{x(size):.1f},{y(share):.1f}" for size, share in points)
    drawn.append(f'<polyline class="line" points="{path}"/>')
    for size, share in points:
        kind = "point" if share >= limit else "point low"
        tip = escape(f"{size} devices: {share:.1%} of the throughput per device of the smallest run")
        drawn.append(
            f'<circle class="{kind}" cx="{x(size):.1f}" cy="{y(share):.1f}" r="4"><title>{tip}</title></circle>'
        )
    drawn += [
        f'<text class="tick" x="{x(size):.1f}" y="{floor + 16}" text-anchor="middle">{size:,}</text>' for size in sizes
    ]
    axis = f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">devices</text>'
    label = "throughput per device by number of devices"
    drawing = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}"'
    return f'<svg class="scaling" {drawing}>{"".join(drawn)}{axis}</svg>'


def _column(parts: Sequence[Part], left: float, width: float, *, across: bool = False) -> str:
    """Return rectangles that divide one of this width, from the bottom up or from left to right (`across`)."""
    drawn, done = [], 0.0
    for part in parts:
        size = (part.share * width, 1) if across else (width, part.share)
        at = (left + done * width, 0) if across else (left, 1 - done - part.share)
        drawn.append(
            f'<rect x="{at[0]:.5g}" y="{at[1]:.5g}" width="{size[0]:.5g}" height="{size[1]:.5g}" '
            f'style="fill:{part.colour}"><title>{escape(part.tip)}</title></rect>'
        )
        done += part.share
    return "".join(drawn)
