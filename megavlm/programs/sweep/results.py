"""What the variants came to: the metric of each, mean and spread over seeds, the difference to a baseline, the best."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from megavlm.programs.preview.account import records_of
from megavlm.programs.sweep.grid import Grid, Variant
from megavlm.programs.sweep.state import State, run_dir_of, state_of


@dataclass(frozen=True)
class Outcome:
    """What one variant came to. The metric is None as long as there is none."""

    variant: Variant
    state: State
    iteration: int
    value: float | None
    tokens_per_second: float | None
    curve: tuple[tuple[int, float], ...]  # iteration and metric


@dataclass(frozen=True)
class Row:
    """What the variants of one group came to: they differ in their seed."""

    group: str
    settings: Mapping[str, str]
    outcomes: tuple[Outcome, ...]
    mean: float | None
    spread: float | None  # standard deviation over seeds; None with fewer than two
    against: float | None  # mean less that of the baseline
    tokens_per_second: float | None

    @property
    def states(self) -> str:
        """Return `finished`, or how many are in which state."""
        found = [outcome.state for outcome in self.outcomes]
        if len(set(found)) == 1:
            return found[0]
        return ", ".join(f"{found.count(state)} {state}" for state in dict.fromkeys(found))

    @property
    def iteration(self) -> int:
        return min(outcome.iteration for outcome in self.outcomes)


def outcome_of(variant: Variant, grid: Grid) -> Outcome:
    """Return what a variant came to, from its run folder."""
    records = [each for each in records_of(run_dir_of(variant)) if isinstance(each.get("iteration"), int)]
    curve = [(each["iteration"], float(each[grid.metric])) for each in records if _is_finite(each.get(grid.metric))]
    rates = [rate for each in records[1:] if _is_finite(rate := each.get("tokens_per_second")) and rate]
    return Outcome(
        variant=variant,
        state=state_of(variant),
        iteration=records[-1]["iteration"] if records else 0,
        value=statistics.fmean(value for _, value in curve[-grid.average_last :]) if curve else None,
        tokens_per_second=statistics.median(rates) if rates else None,
        curve=tuple(curve),
    )


def rows_of(grid: Grid, variants: Sequence[Variant]) -> list[Row]:
    """Return a row for each group, in the order of the grid."""
    groups: dict[str, list[Outcome]] = {}
    for variant in variants:
        groups.setdefault(variant.group, []).append(outcome_of(variant, grid))
    means = {group: _mean([outcome.value for outcome in outcomes]) for group, outcomes in groups.items()}
    base = None if grid.baseline is None else means[grid.baseline]
    return [
        Row(
            group=group,
            settings=outcomes[0].variant.settings,
            outcomes=tuple(outcomes),
            mean=means[group],
            spread=_spread([outcome.value for outcome in outcomes]),
            against=None if base is None or (mean := means[group]) is None else mean - base,
            tokens_per_second=_mean([outcome.tokens_per_second for outcome in outcomes]),
        )
        for group, outcomes in groups.items()
    ]


def best_of(rows: Sequence[Row], *, mode: str) -> Row | None:
    """Return the row with the best mean among those whose variants have all finished; None if there is none."""
    done = [row for row in rows if row.mean is not None and row.states == "finished"]
    if not done:
        return None
    return (min if mode == "min" else max)(done, key=lambda row: row.mean or 0.0)


def columns(grid: Grid, rows: Sequence[Row]) -> list[list[str]]:
    """Return the table as text, the head first."""
    varied = list(dict.fromkeys(key for row in rows for key in row.settings))
    several = any(len(row.outcomes) > 1 for row in rows)
    compared = grid.baseline is not None
    head = ["variant", *varied, "state", "iteration", grid.metric]
    head += [*(["± over seeds"] if several else []), *(["against baseline"] if compared else []), "tokens/s"]
    table = [head]
    for row in rows:
        cells = [row.group, *(row.settings.get(key, "") for key in varied), row.states, str(row.iteration)]
        cells.append(_shown(row.mean))
        cells += [_shown(row.spread)] if several else []
        cells += [_shown(row.against, sign=True)] if compared else []
        table.append([*cells, "" if row.tokens_per_second is None else f"{row.tokens_per_second:.0f}"])
    return table


def as_tsv(table: Sequence[Sequence[str]]) -> str:
    return "".join("\t".join(row) + "\n" for row in table)


def as_markdown(table: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in table]
    lines = [escaped[0], ["---"] * len(table[0]), *escaped[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def as_text(table: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max  # NaN is not


def _shown(value: float | None, *, sign: bool = False) -> str:
    return "" if value is None else f"{value:+.5g}" if sign else f"{value:.5g}"


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.fmean(there) if there else None


def _spread(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.stdev(there) if len(there) > 1 else None
