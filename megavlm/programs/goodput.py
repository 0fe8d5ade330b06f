"""Say what runs' time went to: `megavlm goodput RUN_DIR…` reads their metrics.jsonl and events.jsonl, no more.

Print a summary and write one self-contained HTML page: training, what time was lost to, and how long each restart
took. With --scaling, the throughput per device of runs of several sizes against that of the smallest.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from megavlm.command_line.commands import Parser, reported
from megavlm.errors import UserError
from megavlm.files import write_out
from megavlm.html import document, facts, section, table
from megavlm.programs.account import Account, Scaling, point_of, records_of, scaling_of
from megavlm.programs.charts import duration
from megavlm.programs.history import CAUSES, TRAINING, history_of
from megavlm.resilience.events import events

LIMIT = 0.8  # of the throughput per device of the smallest run


@reported("goodput")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument is wrong (reported in one line)."""
    given = _parser().parse_args(argv)
    accounts = [_account(run) for run in given.runs]
    scaling = _scaling(given.runs) if given.scaling else None
    write_out("--out", given.out, page(accounts, scaling))
    if given.json:
        print(json.dumps(_as_json(accounts, scaling), indent=2))
    else:
        print("\n".join([*(line for account in accounts for line in _lines(account)), *_scaling_lines(scaling)]))
        print(f"wrote {given.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Say what runs' time went to, in words and on an HTML page.", allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="Folders of runs, as given to --run-dir.")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("goodput.html"),
        metavar="FILE",
        help="Write the page here; default: %(default)s.",
    )
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="Compare the throughput per device of runs of several sizes with that of the smallest.",
    )
    parser.add_argument("--json", action="store_true", help="Print the summary as JSON.")
    return parser


def _account(run: Path) -> Account:
    past = history_of(events(run), records_of(run))
    if past is None:
        raise UserError(f"{run} has no events.jsonl that says when a run started: name the folder of a run")
    return Account(run.resolve().name, past)


def _scaling(runs: Sequence[Path]) -> Scaling:
    points = []
    for run in runs:
        point = point_of(run.resolve().name, events(run), records_of(run))
        if point is None:
            raise UserError(f"{run} does not tell its throughput: --scaling needs runs with at least three steps")
        points.append(point)
    if len({point.devices for point in points}) < 2:
        raise UserError("--scaling compares runs on several numbers of devices: name at least two")
    return scaling_of(points)


def _lines(account: Account) -> list[str]:
    past = account.history
    restarts = f"{past.restarts} restart{'s'[: past.restarts != 1]}"
    back = "" if account.typical_recovery is None else f", {duration(account.typical_recovery)} until the next step"
    return [
        f"{account.name}: {past.goodput:.1%} of {duration(past.wall)} is training; "
        f"{account.iterations:,} iterations, {restarts}{back}",
        *(f"{value / past.wall:6.1%} {value:9.1f} s  {cause}: {CAUSES[cause]}" for cause, value in _causes(account)),
    ]


def _causes(account: Account) -> list[tuple[str, float]]:
    """Return the seconds of each cause: training first, then the largest."""
    return sorted(account.history.seconds.items(), key=lambda item: (item[0] != TRAINING, -item[1]))


def _scaling_lines(scaling: Scaling | None) -> list[str]:
    if scaling is None:
        return []
    return [
        f"{point.name}: {point.devices:,} devices, {point.per_device:,.0f} tokens/s each, {share:.1%} of the smallest"
        + (f", below {LIMIT:.0%}" if share < LIMIT else "")
        for point, share in zip(scaling.points, scaling.shares, strict=True)
    ]


def _as_json(accounts: Sequence[Account], scaling: Scaling | None) -> dict[str, object]:
    points = [] if scaling is None else zip(scaling.points, scaling.shares, strict=True)
    return {
        "runs": [account.as_json() for account in accounts],
        "scaling": [{**vars(point), "per_device": point.per_device, "share": share} for point, share in points],
    }


def page(accounts: Sequence[Account], scaling: Scaling | None) -> str:
    """Return the HTML of the page, in which text from the runs is escaped."""
    body = []
    if scaling is not None:
        body.append(section("Throughput per device against the smallest run", _scaling_table(scaling)))
    for account in accounts:
        body.append(section(account.name, _account_of(account)))
        if account.recoveries:
            body.append(section(f"Restarts of {account.name}", _recoveries(account)))
    title = f"“{accounts[0].name}”" if len(accounts) == 1 else f"{len(accounts)} runs"
    return document(f"Goodput of {title}", [f"<header><h1>Goodput of {escape(title)}</h1></header>", *body])


def _account_of(account: Account) -> str:
    past, back = account.history, account.typical_recovery
    about = facts(
        (
            ("training", f"{past.goodput:.1%} of {duration(past.wall)}"),
            ("iterations", f"{account.iterations:,}"),
            ("restarts", f"{past.restarts:,}"),
            ("back in training after", "–" if back is None else duration(back)),
            ("devices", f"{account.devices:,}" if account.devices else "unknown"),
        )
    )
    rows = (
        (
            f"{cause}<small>{escape(CAUSES[cause])}</small>",
            f'<div class="share"><i style="width:{value / past.wall:.2%};background:var(--source-0)"></i></div>',
            f"{value / past.wall:.1%}",
            duration(value),
        )
        for cause, value in _causes(account)
    )
    return about + table(("", "", "share", "time"), rows, numbers=(2, 3))


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


def _scaling_table(scaling: Scaling) -> str:
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
    return about + table(("run", "devices", "tokens/s", "per device", "of the smallest"), rows, numbers=(1, 2, 3, 4))
