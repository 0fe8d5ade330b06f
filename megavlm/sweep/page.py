"""Write the results of a sweep as one HTML page that needs no script, font, other file or network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megavlm.preview.html import document, facts, section, table
from megavlm.preview.style import COLOURS
from megavlm.sweep.grid import Grid
from megavlm.sweep.results import Row, best_of, columns

_WIDTH, _HEIGHT = 760, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 34
_MOST_POINTS = 300  # of a curve


def page(title: str, grid: Grid, rows: Sequence[Row]) -> str:
    """Return the HTML of the page, in which text from the grid and the runs is escaped."""
    best = best_of(rows, mode=grid.mode)
    head, *body = columns(grid, rows)
    cells = []
    for number, (row, line) in enumerate(zip(rows, body, strict=True)):
        dot = f'<i class="dot" style="background:{_colour(number)}"></i>'
        name = f"<b>{escape(line[0])}</b>" if row is best else escape(line[0])
        cells.append([dot + name, *map(escape, line[1:])])
    numbers = range(head.index("state") + 1, len(head))
    about = facts(
        (
            ("variants", f"{sum(len(row.outcomes) for row in rows):,}"),
            ("finished", f"{sum(outcome.state == 'finished' for row in rows for outcome in row.outcomes):,}"),
            (f"best by {grid.metric} ({grid.mode})", "none finished yet" if best is None else best.group),
            *([("baseline", grid.baseline)] if grid.baseline else []),
        )
    )
    return document(
        f"Sweep “{title}”",
        [
            f"<header><h1>Sweep “{escape(title)}”</h1></header>",
            section("Results", about + table(map(escape, head), cells, numbers=numbers)),
            section(f"{grid.metric} by iteration", curves(rows)),
        ],
    )


def curves(rows: Sequence[Row]) -> str:
    """Return a line for each variant, in the colour of its group."""
    drawn = [(number, outcome) for number, row in enumerate(rows) for outcome in row.outcomes if outcome.curve]
    if not drawn:
        return '<p class="quiet">No values yet.</p>'
    last = max(outcome.curve[-1][0] for _, outcome in drawn)
    values = [value for _, outcome in drawn for _, value in outcome.curve]
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def x(iteration: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * iteration / last

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / span

    lines = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value, at = low + span * share, y(low + span * share)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        lines.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        iteration = round(last * share)
        lines.append(
            f'<text class="tick" x="{x(iteration):.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{iteration:,}</text>'
        )
    for number, outcome in drawn:
        step = -(-len(outcome.curve) // _MOST_POINTS)
        thinned = [*outcome.curve[::step], outcome.curve[-1]]
        points = " ".join(f"{x(iteration):.1f},{y(value):.1f}" for iteration, value in thinned)
        tip = escape(f"{outcome.variant.name}: {outcome.curve[-1][1]:.5g} at {outcome.curve[-1][0]}")
        style = f"fill:none;stroke:{_colour(number)};stroke-width:1.6"
        lines.append(f'<polyline points="{points}" style="{style}"><title>{tip}</title></polyline>')
    label = "metric by iteration, a line for each variant"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(lines)}</svg>'


def _colour(number: int) -> str:
    return f"var(--source-{number % COLOURS})"
