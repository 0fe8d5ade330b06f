"""Draw histograms as SVG, in the colours of the page's style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megavlm.config.messages import several

_WIDTH, _HEIGHT = 520, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 8, 12, 34
_MOST_BARS = 32


def bins_of(values: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (first, last, count) of bins that cover all values; each is 1, 2 or 5 times a power of ten wide."""
    low, high = min(values), max(values)
    width = next(step for step in _round_numbers() if (high // step - low // step + 1) <= _MOST_BARS)
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
