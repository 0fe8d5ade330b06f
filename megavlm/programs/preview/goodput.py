"""Write what runs' time went to as one HTML page that needs no script, font, other file or network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from megavlm.config.messages import several
from megavlm.html import document, facts, section, table
from megavlm.programs.preview import history
from megavlm.programs.preview.account import KILLED, Account, Scaling
from megavlm.programs.preview.history import CAUSES
from megavlm.programs.preview.run_charts import Mark, Part, duration, scaling_chart, share_bar, time_line

_COLOURS = {
    history.TRAINING: "var(--trained-line)",
    history.DATA: "var(--source-8)",
    history.SLOW: "var(--source-9)",
    history.SAVES: "var(--source-4)",
    history.VALIDATION: "var(--source-6)",
    history.SKIPPED: "var(--source-11)",
    history.REWOUND: "var(--source-3)",
    history.LOST: "var(--source-1)",
    history.HUNG: "var(--source-7)",
    history.DOWNTIME: "var(--source-10)",
    history.START: "var(--source-0)",
    history.LOAD: "var(--source-5)",
    history.OTHER: "var(--line)",
}
# Events on the time line; saves and starts would cover it.
_SIGNS = {
    KILLED: "×",
    "failure": "×",
    "hang": "‖",
    "stop": "■",
    "finish": "✓",
    "skip": "◇",
    "rewind": "«",
    "worker": "w",
    "damage": "!",
    "save_failed": "!",
    "mismatch": "≠",
    "slow": "~",
}
_MOST_EVENTS = 500  # in the table of events
LIMIT = 0.8  # of the throughput per device of the smallest run


def page(accounts: Sequence[Account], scaling: Scaling | None) -> str:
    """Return the HTML of the page, in which text from the runs is escaped."""
    body = []
    if scaling is not None:
        body.append(section("Throughput per device against the smallest run", _scaling(scaling)))
    if len(accounts) > 1:
        body.append(section("Runs", _overview(accounts)))
    for account in accounts:
        body += _run(account)
    title = f"“{accounts[0].name}”" if len(accounts) == 1 else f"{len(accounts)} runs"
    return document(f"Goodput of {title}", [f"<header><h1>Goodput of {escape(title)}</h1></header>", *body])


def _run(account: Account) -> list[str]:
    past = account.history
    named = (
        () if account.typical_recovery is None else (("back in training after", duration(account.typical_recovery)),)
    )
    about = facts(
        (
            ("training", f"{past.goodput:.1%} of {duration(past.wall)}"),
            ("iterations", f"{account.iterations:,}"),
            ("restarts", f"{past.restarts:,}"),
            *named,
            ("devices", f"{account.devices:,}" if account.devices else "unknown"),
        )
    )
    return [
        section(account.name, about + share_bar(_parts(past.microseconds)) + _causes(account)),
        section("Time line", _time_line(account)),
        *([section("Restarts", _recoveries(account))] if account.recoveries else []),
        section("Events", _events(account)),
    ]


def _parts(microseconds: Mapping[str, int]) -> list[Part]:
    """Return the causes in the order of CAUSES as parts of the whole."""
    whole = sum(microseconds.values())
    return [
        Part(microseconds[cause] / whole, _COLOURS[cause], f"{cause}: {microseconds[cause] / whole:.1%}")
        for cause in CAUSES
        if microseconds.get(cause)
    ]


def _causes(account: Account) -> str:
    seconds, wall = account.history.seconds, account.history.wall
    rows = (
        (
            f'<i class="dot" style="background:{_COLOURS[cause]}"></i>{cause}<small>{escape(CAUSES[cause])}</small>',
            f"{value / wall:.1%}",
            duration(value),
        )
        for cause, value in sorted(seconds.items(), key=lambda item: (item[0] != history.TRAINING, -item[1]))
    )
    return table(("", "share", "time"), rows, numbers=(1, 2))


def _time_line(account: Account) -> str:
    past = account.history
    shown = _marks(account)
    attempts = [
        Part(
            (attempt.until - attempt.began) / (past.wall * 1e6),
            "var(--image-ink)" if number % 2 else "var(--image)",
            f"attempt {number}: {duration((attempt.until - attempt.began) / 1e6)}, "
            f"{several(len(attempt.steps), 'step')} kept",
        )
        for number, attempt in enumerate(past.attempts)
    ]
    counts = Counter(mark.tip.partition(" at ")[0] for mark in shown)
    legend = " · ".join(
        f"{_SIGNS[kind]}&nbsp;{kind}" + (f" ({number})" if number > 1 else "") for kind, number in counts.items()
    )
    about = (
        '<p class="quiet">Each column is divided like its part of the time, in the colours of the table above. '
        f"Below it the attempts, above it the events{f': {legend}' if legend else ''}.</p>"
    )
    return about + time_line([_parts(part) for part in past.bins], attempts, shown, past.wall)


def _marks(account: Account) -> list[Mark]:
    """Return a mark for each event that the time line shows, and for attempts that were killed."""
    past = account.history
    moments = [
        ((time - past.begin) / 1e6, str(event.get("kind")), str(event.get("reason", "")))
        for attempt in past.attempts
        for time, event in attempt.events
    ]
    moments += [(each.at, each.kind, "") for each in account.recoveries if each.kind == KILLED]
    found = []
    seen: set[tuple[int, str]] = set()
    for seconds, kind, reason in sorted(moments):
        place = (int(seconds / past.wall * len(past.bins)), kind)
        if kind in _SIGNS and place not in seen:
            seen.add(place)
            tip = f"{kind} at {duration(seconds)}" + (f": {reason}" if reason else "")
            found.append(Mark(seconds / past.wall, _SIGNS[kind], tip))
    return found


def _recoveries(account: Account) -> str:
    def known(seconds: float | None) -> str:
        return "not yet" if seconds is None else duration(seconds)

    rows = (
        (
            duration(each.at),
            escape(each.kind),
            f"{each.lost_steps:,}",
            known(each.to_step),
            known(each.to_catch_up),
            escape(each.reason),
        )
        for each in account.recoveries
    )
    head = ("at", "end of the attempt", "steps lost", "until the next step", "until caught up", "reason")
    return table(head, rows, numbers=(0, 2, 3, 4))


def _events(account: Account) -> str:
    past = account.history
    moments = [(time, event) for attempt in past.attempts for time, event in attempt.events]
    counts = Counter(str(event.get("kind")) for _, event in moments)
    rows = (
        (
            duration((time - past.begin) / 1e6),
            escape(str(event.get("kind"))),
            escape(str(event.get("iteration", ""))),
            escape(_text(event)),
        )
        for time, event in moments[-_MOST_EVENTS:]
    )
    said = ", ".join(f"{number:,} {escape(kind)}" for kind, number in counts.most_common())
    last = f"the last {_MOST_EVENTS} of {len(moments):,}" if len(moments) > _MOST_EVENTS else f"{len(moments):,}"
    listed = table(("at", "kind", "iteration", "reason"), rows, numbers=(0, 2))
    return f"<p>{said}</p><details><summary>{last} events</summary>{listed}</details>"


def _text(event: Mapping[str, Any]) -> str:
    said = [str(event["reason"])] if "reason" in event else []
    return "; ".join([*said, *([f"{event['seconds']} s"] if "seconds" in event else [])])


def _overview(accounts: Sequence[Account]) -> str:
    rows = (
        (
            f'{escape(account.name)}<div class="cell">{share_bar(_parts(account.history.microseconds))}</div>',
            f"{account.history.goodput:.1%}",
            duration(account.history.wall),
            f"{account.iterations:,}",
            f"{account.history.restarts:,}",
        )
        for account in accounts
    )
    return table(("run", "training", "time", "iterations", "restarts"), rows, numbers=(1, 2, 3, 4))


def _scaling(scaling: Scaling) -> str:
    rows = (
        (
            escape(point.name),
            f"{point.devices:,}",
            f"{point.tokens_per_second:,.0f}",
            f"{point.per_device:,.0f}",
            f'<b class="warning">{share:.1%}</b>' if share < LIMIT else f"{share:.1%}",
        )
        for point, share in zip(scaling.points, scaling.shares, strict=True)
    )
    about = '<p class="quiet">tokens/s: the median of all steps but the first two.</p>'
    head = ("run", "devices", "tokens/s", "per device", "of the smallest")
    drawn = [(point.devices, share) for point, share in zip(scaling.points, scaling.shares, strict=True)]
    return scaling_chart(drawn, limit=LIMIT) + about + table(head, rows, numbers=(1, 2, 3, 4))
