"""Draw the load of the experts of each layer as a heat map: a row per layer, a column per expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_FULL = 2.0  # times the mean, from which on a cell has the darkest colour
_LAST = 20  # recorded steps that the map is the mean of

Loads = Mapping[str, Sequence[float]]  # of each layer: the tokens of each expert over their mean


def mean_loads(lines: Sequence[Mapping[str, object]]) -> dict[str, list[float]]:
    """Return the mean loads of the last recorded steps, by layer; what is no list of numbers is left out."""
    found: dict[str, list[list[float]]] = {}
    for line in lines[-_LAST:]:
        for layer, loads in line.items():
            if isinstance(loads, list) and loads and all(isinstance(each, int | float) for each in loads):
                found.setdefault(layer, []).append(loads)
    return {
        layer: [sum(each) / len(each) for each in zip(*rows, strict=True)]
        for layer, rows in found.items()
        if len({len(row) for row in rows}) == 1
    }


def heat_map(loads: Loads) -> str:
    """Return a table whose cells are the darker, the fuller an expert is; a cell tells its load to who points at it."""
    rows = []
    for layer, values in loads.items():
        cells = "".join(
            f'<i style="flex:1;height:14px;background:var(--source-0);opacity:{min(load / _FULL, 1):.2f}" '
            f'title="{escape(layer)}, expert {expert}: {load:.2f} × the mean"></i>'
            for expert, load in enumerate(values)
        )
        told = f"{escape(layer)}: fullest {max(values):.2f} × the mean, emptiest {min(values):.2f} ×"
        rows.append(f'<p class="quiet" style="margin:6px 0 2px">{told}</p><div style="display:flex">{cells}</div>')
    about = (
        f'<p class="quiet">Tokens of each expert over their mean, from expert 0 on the left, in the last {_LAST} '
        f"recorded steps. Half dark: the mean; dark: {_FULL:.0f} × and more. No token is dropped.</p>"
    )
    return about + "".join(rows)
