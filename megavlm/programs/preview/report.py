"""Compare runs on one HTML page that needs no script, font, other file or network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from megavlm.config.messages import several
from megavlm.html import COLOURS, document, section, table
from megavlm.metrics.tags import tag_of
from megavlm.programs.preview.expert_loads import heat_map
from megavlm.programs.preview.lines import Line, chart, short
from megavlm.programs.preview.run_charts import duration
from megavlm.programs.preview.run_data import RunData, differing

_ACROSS = {"step": "steps", "tokens": "tokens trained on", "hours": "hours of steps, without pauses"}
_MOST_EVENTS = 200  # of each run
_NO_CHART = ("/perplexity", "/trained_tokens", "/pairs")  # what the loss shows too, and constants
_UNKNOWN = "–"


def page(runs: Sequence[RunData]) -> str:
    """Return the HTML of the page, in which text from the runs is escaped."""
    title = f"“{runs[0].name}”" if len(runs) == 1 else f"{len(runs)} runs"
    body = [
        f"<header><h1>Report on {escape(title)}</h1></header>",
        section("Runs", _overview(runs)),
        section("Loss", _charts(_over(runs, "loss", each, title=f"{tag_of('loss')} by {each}") for each in _ACROSS)),
        *([section("Held-out data", _validation(runs))] if any(run.validations for run in runs) else []),
        section("Speed and memory", _charts(_speed(runs))),
        section("Optimization", _charts(_optimization(runs))),
        section("Data", _charts(_data(runs))),
        *(section(f"Experts of {run.name}", heat_map(run.expert_loads)) for run in runs if run.expert_loads),
        section("Different options" if len(runs) > 1 else "Options that differ from their defaults", _options(runs)),
        *(section(f"Events of {run.name}", _events(run)) for run in runs if run.events),
    ]
    return document(f"Report on {title}", body)


def _colour(place: int) -> str:
    return f"var(--source-{place % COLOURS})"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _known(value: float | None, told: Callable[[float], str]) -> str:
    return _UNKNOWN if value is None else told(value)


def _overview(runs: Sequence[RunData]) -> str:
    head = ("run", "steps", "loss", "tokens", "time of steps", "tokens/s", "per device", "MFU", "memory", "data wait",
            "skipped", "restarts")  # fmt: skip
    rows = [[_name(place, run), *_figures(run)] for place, run in enumerate(runs)]
    about = (
        '<p class="quiet">Loss: mean of the last 20 steps. Rates: medians of all steps but the first two. '
        "Memory: the most that any rank has used. "
        "Data wait: share of the steps' time. Skipped: samples that could not be used, and steps left out.</p>"
    )
    return about + table(head, rows, numbers=range(1, len(head)))


def _name(place: int, run: RunData) -> str:
    ranks = f"{run.devices:,} × " if run.devices else ""
    dot = f'<i class="dot" style="background:{_colour(place)}"></i>'
    return f"{dot}{escape(run.name)}<small>{ranks}{escape(run.device)}</small>"


def _figures(run: RunData) -> list[str]:
    losses, rate = run.values("loss")[-20:], run.typical("tokens_per_second")
    spent = sum(run.values("step_time_s"))
    wait = sum(run.values("data_time_s")) / spent if spent else None
    steps = run.values("skipped_steps")
    memory = run.values("peak_memory_gib")
    return [
        f"{run.axes['step'][-1]:,.0f}",
        _known(sum(losses) / len(losses) if losses else None, lambda x: f"{x:.4f}"),
        short(run.axes["tokens"][-1]),
        duration(spent),
        _known(rate, lambda x: f"{x:,.0f}"),
        _known(rate / run.devices if rate is not None and run.devices else None, lambda x: f"{x:,.0f}"),
        _known(run.typical("mfu"), _share),
        _known(max(memory) if memory else None, lambda x: f"{x:.1f} GiB"),
        _known(wait, _share),
        f"{several(int(sum(run.values('skipped_samples'))), 'sample')}, "
        f"{several(int(steps[-1]) if steps else 0, 'step')}",
        _UNKNOWN if run.history is None else f"{run.history.restarts:,}",
    ]


def _over(runs: Sequence[RunData], name: str, across: str = "step", **options: Any) -> str:
    """Return a chart of a number of all runs."""
    lines = [Line(run.name, _colour(place), run.points(name, across=across)) for place, run in enumerate(runs)]
    title = options.pop("title", tag_of(name))
    return chart(title, lines, across=_ACROSS[across], **options)


def _charts(charts: Iterable[str]) -> str:
    drawn = "".join(charts)
    return f'<div class="figures">{drawn}</div>' if drawn else '<p class="quiet">No values.</p>'


def _validation(runs: Sequence[RunData]) -> str:
    names = sorted(set().union(*(run.validations for run in runs)))
    rows = [
        [_name(place, run), *(_known(next(iter(run.values(name)[-1:]), None), lambda x: f"{x:.4g}") for name in names)]
        for place, run in enumerate(runs)
    ]
    last = table(("last value", *(escape(tag_of(name)) for name in names)), rows, numbers=range(1, len(names) + 1))
    return _charts(_over(runs, name) for name in names if not name.endswith(_NO_CHART)) + last


def _speed(runs: Sequence[RunData]) -> list[str]:
    waits = []
    for place, run in enumerate(runs):
        waited, spent = dict(run.points("data_time_s")), dict(run.points("step_time_s"))
        shares = [(step, waited[step] / spent[step]) for step in waited if spent.get(step)]
        waits.append(Line(run.name, _colour(place), shares))
    return [
        _over(runs, "tokens_per_second", from_zero=True),
        _over(runs, "mfu", told=_share, from_zero=True),
        _over(runs, "peak_memory_gib", title="peak memory of the fullest rank, GiB", from_zero=True),
        chart("share of the step that waits for data", waits, across=_ACROSS["step"], told=_share, from_zero=True),
    ]


def _optimization(runs: Sequence[RunData]) -> list[str]:
    return [_over(runs, "learning_rate", from_zero=True), _over(runs, "grad_norm", from_zero=True)]


def _data(runs: Sequence[RunData]) -> list[str]:
    return [
        _over(runs, "packing_efficiency", told=_share, title="share of positions that hold tokens"),
        _over(runs, "skipped_samples", title="skipped samples of a step", from_zero=True),
    ]


def _options(runs: Sequence[RunData]) -> str:
    unlike = differing(runs)
    if not any(run.settings for run in runs):
        return '<p class="quiet">No config.yaml can be read.</p>'
    if not unlike:
        return '<p class="quiet">None.</p>'
    rows = ([escape(key), *(escape(_told(value)) for value in values)] for key, values in unlike.items())
    return table(("option", *(escape(run.name) for run in runs)), rows)


def _told(value: Any) -> str:
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _events(run: RunData) -> str:
    counts = Counter(str(event.get("kind")) for event in run.events)
    said = ", ".join(f"{number:,} {escape(kind)}" for kind, number in counts.most_common())
    rows = (
        [escape(str(event.get(name, ""))) for name in ("time", "kind", "iteration", "rank", "reason")]
        for event in run.events[-_MOST_EVENTS:]
    )
    listed = table(("time", "kind", "iteration", "rank", "reason"), rows, numbers=(2, 3))
    shown = min(len(run.events), _MOST_EVENTS)
    return f"<p>{said}</p><details><summary>the last {shown:,} of {len(run.events):,}</summary>{listed}</details>"
