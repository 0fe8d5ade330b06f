"""Compare runs on one page: `megavlm report RUN_DIR…`, also while they train.

Write one self-contained HTML page: loss by steps, tokens and hours, held-out data, speed, memory, data, the options in
which the runs differ, and their events.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from megavlm.command_line.commands import Parser, reported
from megavlm.config.messages import several
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.files import write_out
from megavlm.html import colour, document, dot, section, table
from megavlm.json_files import read_own
from megavlm.metrics.trackers import settings_of, tag_of
from megavlm.programs.history import devices_of, duration, number, read_runs, records_of
from megavlm.resilience.events import events
from megavlm.rules.load import from_yaml_file

_ACROSS = {"step": "steps", "tokens": "tokens trained on", "hours": "hours of steps, without pauses"}
_WARM_UP = 2  # first steps, which are slower and left out of rates
_NO_CHART = ("/perplexity", "/trained_tokens", "/pairs")  # metrics that the loss shows too, and constants


@reported("report")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument is wrong (reported in one line)."""
    given = _parser().parse_args(argv)
    write_out("--out", given.out, page(read_runs(given.runs, read_run)))
    print(f"wrote {given.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Compare runs on one HTML page.", allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="Folders of runs, as given to --run-dir.")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="Write the page here.")
    return parser


@dataclass(frozen=True)
class RunRecord:
    """The records, events and options in a run folder. `records` are the lines of metrics.jsonl, in order."""

    name: str
    records: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]  # all options by key; empty if config.yaml cannot be read
    device: str

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        return [event for event in self.events if event.get("kind") == "start"]

    @cached_property
    def axes(self) -> Mapping[str, Sequence[float]]:
        """Return the position of each record by axis: its step, and the tokens and hours of all steps so far."""
        return {
            "step": [float(record["iteration"]) for record in self.records],
            "tokens": list(accumulate(number(record.get("tokens")) or 0.0 for record in self.records)),
            "hours": [x / 3600 for x in accumulate(number(r.get("step_time_s")) or 0.0 for r in self.records)],
        }

    def points(self, name: str, *, across: str = "step") -> list[Point]:
        """Return (position, value) of a metric over one of the `axes`, for the records that have it."""
        values = [number(record.get(name)) for record in self.records]
        return [(x, y) for x, y in zip(self.axes[across], values, strict=True) if y is not None]

    def values(self, name: str) -> list[float]:
        """Return the values of a metric, for the records that have it."""
        return [value for _, value in self.points(name)]

    def typical(self, name: str) -> float | None:
        """Return the median of a metric after the first two values; None if no record has it."""
        found = self.values(name)
        return statistics.median(found[_WARM_UP:] or found) if found else None

    @property
    def validations(self) -> list[str]:
        """Return the names of the metrics that were measured on validation data."""
        names = {name for record in self.records for name in record}
        return sorted(name for name in names if tag_of(name).startswith("validation/") and self.values(name))


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. Raises UserError if it has no metrics."""
    records = [record for record in records_of(folder) if number(record.get("iteration")) is not None]
    if not records:
        raise UserError(f"{folder} has no metrics.jsonl with steps: name the folder of a run")
    settings: Mapping[str, Any] = {}
    with suppress(UserError):  # written by a version with other options
        settings = settings_of(from_yaml_file(folder / "config.yaml"))
    device = str(read_own(folder / "environment.json").get("device", "unknown"))
    return RunRecord(folder.resolve().name, records, events(folder), settings, device)


def differing(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the options that differ between runs, with each run's value; for one run, those that are not defaults."""
    known = [run.settings for run in runs]
    base = known if len(runs) > 1 else [settings_of(Config()), *known]
    keys = [key for key in settings_of(Config()) if key not in ("run.run_dir", "logging.tracker_run_name")]
    unlike = [key for key in keys if any(each.get(key) != base[0].get(key) for each in base if each)]
    return {key: [each.get(key) for each in known] for key in unlike}


def page(runs: Sequence[RunRecord]) -> str:
    """Return the HTML of the page, in which text from the runs is escaped."""
    title = f"“{runs[0].name}”" if len(runs) == 1 else f"{len(runs)} runs"
    loss = [_over(runs, "loss", each, title=f"{tag_of('loss')} by {each}") for each in _ACROSS]
    speed = [
        _over(runs, "tokens_per_second", from_zero=True),
        _over(runs, "mfu", shown=_share, from_zero=True),
        _over(runs, "peak_memory_gib", title="peak memory of the fullest rank, GiB", from_zero=True),
        _over(runs, "data_time_s", title="seconds of the step that wait for data", from_zero=True),
    ]
    optimization = [_over(runs, "learning_rate", from_zero=True), _over(runs, "grad_norm", from_zero=True)]
    data = [
        _over(runs, "packing_efficiency", shown=_share, title="share of positions that hold tokens"),
        _over(runs, "skipped_samples", title="skipped samples of a step", from_zero=True),
    ]
    body = [
        f"<header><h1>Report on {escape(title)}</h1></header>",
        section("Runs", _overview(runs)),
        section("Loss", _charts(loss)),
        *([section("Held-out data", _validation(runs))] if any(run.validations for run in runs) else []),
        section("Speed and memory", _charts(speed)),
        section("Optimization", _charts(optimization)),
        section("Data", _charts(data)),
        section("Different options" if len(runs) > 1 else "Options that differ from their defaults", _options(runs)),
        *(section(f"Events of {run.name}", _events(run)) for run in runs if run.events),
    ]
    return document(f"Report on {title}", body)


def _share(value: float) -> str:
    return f"{value:.1%}"


def _known(value: float | None, shown: Callable[[float], str]) -> str:
    return "–" if value is None else shown(value)


def _overview(runs: Sequence[RunRecord]) -> str:
    head = ("run", "steps", "loss", "tokens", "time of steps", "tokens/s", "per device", "MFU", "memory", "data wait",
            "skipped", "restarts")  # fmt: skip
    rows = [[_name(place, run), *_figures(run)] for place, run in enumerate(runs)]
    about = (
        '<p class="quiet">Loss: mean of the last 20 steps. Rates: medians of all steps but the first two. '
        "Memory: the most that any rank has used. "
        "Data wait: share of the steps' time. Skipped: samples that could not be used, and steps left out.</p>"
    )
    return about + table(head, rows, numbers=range(1, len(head)))


def _name(place: int, run: RunRecord) -> str:
    devices = devices_of(run.starts)
    ranks = f"{devices:,} × " if devices else ""
    return f"{dot(place)}{escape(run.name)}<small>{ranks}{escape(run.device)}</small>"


def _figures(run: RunRecord) -> list[str]:
    losses, rate = run.values("loss")[-20:], run.typical("tokens_per_second")
    spent, memory, steps = sum(run.values("step_time_s")), run.values("peak_memory_gib"), run.values("skipped_steps")
    devices = devices_of(run.starts)
    return [
        f"{run.axes['step'][-1]:,.0f}",
        _known(sum(losses) / len(losses) if losses else None, lambda x: f"{x:.4f}"),
        short(run.axes["tokens"][-1]),
        duration(spent),
        _known(rate, lambda x: f"{x:,.0f}"),
        _known(rate / devices if rate is not None and devices else None, lambda x: f"{x:,.0f}"),
        _known(run.typical("mfu"), _share),
        _known(max(memory) if memory else None, lambda x: f"{x:.1f} GiB"),
        _known(sum(run.values("data_time_s")) / spent if spent else None, _share),
        f"{several(int(sum(run.values('skipped_samples'))), 'sample')}, "
        f"{several(int(steps[-1]) if steps else 0, 'step')}",
        f"{max(len(run.starts) - 1, 0):,}",
    ]


def _over(runs: Sequence[RunRecord], name: str, across: str = "step", **options: Any) -> str:
    """Return a chart of a metric with a line for each run."""
    lines = [Line(run.name, colour(place), run.points(name, across=across)) for place, run in enumerate(runs)]
    title = options.pop("title", tag_of(name))
    return chart(title, lines, across=_ACROSS[across], **options)


def _charts(charts: Iterable[str]) -> str:
    drawn = "".join(charts)
    return f'<div class="figures">{drawn}</div>' if drawn else '<p class="quiet">No values.</p>'


def _validation(runs: Sequence[RunRecord]) -> str:
    names = sorted(set().union(*(run.validations for run in runs)))
    rows = [
        [_name(place, run), *(_known(next(iter(run.values(name)[-1:]), None), lambda x: f"{x:.4g}") for name in names)]
        for place, run in enumerate(runs)
    ]
    last = table(("last value", *(escape(tag_of(name)) for name in names)), rows, numbers=range(1, len(names) + 1))
    return _charts(_over(runs, name) for name in names if not name.endswith(_NO_CHART)) + last


def _options(runs: Sequence[RunRecord]) -> str:
    unlike = differing(runs)
    if not any(run.settings for run in runs):
        return '<p class="quiet">No config.yaml can be read.</p>'
    if not unlike:
        return '<p class="quiet">None.</p>'
    rows = ([escape(key), *(escape(_value(value)) for value in values)] for key, values in unlike.items())
    return table(("option", *(escape(run.name) for run in runs)), rows)


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _events(run: RunRecord) -> str:
    counts = Counter(str(event.get("kind")) for event in run.events)
    listed = ", ".join(f"{number:,} {escape(kind)}" for kind, number in counts.most_common())
    return f"<p>{listed}</p>"


Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line of a chart: name, colour in CSS, and points (x, y)."""

    name: str
    colour: str
    points: Sequence[Point]


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

    `shown` formats a value; with `from_zero`, the vertical axis includes 0. Lines are SVG, and labels HTML, so that a
    narrow screen squeezes the lines and not the letters.
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
