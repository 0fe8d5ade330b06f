"""Write the results of a sweep as one HTML page that needs no script, font, other file or network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megavlm.html import COLOURS, document, facts, section, table
from megavlm.programs.preview.lines import Line, chart
from megavlm.programs.sweep.grid import Grid
from megavlm.programs.sweep.results import Row, best_of, columns


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
            section("Curves", curves(grid.metric, rows)),
        ],
    )


def curves(metric: str, rows: Sequence[Row]) -> str:
    """Return a chart with a line for each variant, in the colour of its group."""
    lines = [
        Line(outcome.variant.name, _colour(number), outcome.curve)
        for number, row in enumerate(rows)
        for outcome in row.outcomes
    ]
    return chart(metric, lines, across="iterations") or '<p class="quiet">No values yet.</p>'


def _colour(number: int) -> str:
    return f"var(--source-{number % COLOURS})"
