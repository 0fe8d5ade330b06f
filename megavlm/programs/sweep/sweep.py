"""Train the variants of a run and compare them: `megavlm sweep GRID.yaml [--on slurm] [--parallel 5]`.

GRID.yaml describes the variants (docs/clusters.md). The options of all variants are checked before any variant starts.
Finished variants are skipped, so that the same command resumes an interrupted sweep. The result is a table,
RUN_DIR/sweep.tsv.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megavlm.command_line.commands import Parser, count, reported
from megavlm.config.messages import aligned, did_you_mean, plain
from megavlm.errors import UserError
from megavlm.files import write_out
from megavlm.programs.history import number, records_of
from megavlm.programs.launch import slurm
from megavlm.programs.launch.checks import add_check_options, check_job, read_profile
from megavlm.programs.launch.job import Command, Job
from megavlm.programs.sweep.grid import Grid, Variant, check_variants, read_grid, variants_of
from megavlm.programs.sweep.training import (
    array_command,
    note_flags,
    run_dir_of,
    state_of,
    to_train,
    train_here,
    write_flags,
)


@reported("sweep")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done or submitted, 1 a variant failed, 2 a mistake (one line), 75 a signal."""
    options, more = _parser().parse_known_args(argv)
    grid = read_grid(options.grid)
    variants = variants_of(grid)
    if options.report:
        report(grid, variants)
        return 0
    _check(options, more, grid, variants)
    waiting = to_train(variants, retry_failed=options.retry_failed)
    if options.dry_run:
        for variant in variants:
            print(f"{variant.name}  [{state_of(variant)}]  {shlex.join(variant.flags)}")
        print(f"{len(waiting)} of {len(variants)} variants would train")
        if options.on == "slurm" and waiting:
            print(_command(options, more, grid, waiting))
        return 0
    note_flags(Path(grid.run_dir), variants)
    failed = sum(state_of(variant) == "failed" for variant in variants if variant not in waiting)
    hint = f"; {failed} failed: --retry-failed starts them again" if failed else ""
    print(f"{len(waiting)} of {len(variants)} variants are to train{hint}", flush=True)
    status = start(options, more, grid, waiting) if waiting else 0
    if options.on == "local" or not waiting:
        report(grid, variants)
    return status


def _check(options: argparse.Namespace, more: Sequence[str], grid: Grid, variants: Sequence[Variant]) -> None:
    if more and options.on == "local":
        raise UserError(f"{more[0]} is no option of this program; options of a scheduler need --on")
    read_profile(options.profile)
    if options.on == "local" and options.image is not None:
        raise UserError("--image needs --on slurm: here variants train in the environment of this command")
    if options.on == "local" and grid.nodes > 1:
        raise UserError(f"grid: nodes {grid.nodes} need --on slurm: here a variant trains on this machine")
    job = Job(grid.nodes, grid.processes, ())
    shared = options.on != "slurm" or options.run_dir_is_shared
    check_variants(grid, variants, further=lambda config: check_job(config, job, gpu=options.gpu, shared=shared))


def start(options: argparse.Namespace, more: Sequence[str], grid: Grid, waiting: Sequence[Variant]) -> int:
    """Train or submit the variants in `waiting`; return the exit status."""
    if options.on == "local":
        profile = () if options.profile is None else ("--profile", options.profile)
        say = partial(print, flush=True)
        return train_here(grid, waiting, parallel=options.parallel or 1, say=say, profile=profile)
    write_flags(grid, waiting)
    return slurm.submit(_command(options, more, grid, waiting))


def _command(options: argparse.Namespace, more: Sequence[str], grid: Grid, waiting: Sequence[Variant]) -> Command:
    parallel = options.parallel or 0
    return array_command(grid, waiting, more, parallel=parallel, profile=options.profile, image=options.image)


def report(grid: Grid, variants: Sequence[Variant]) -> None:
    """Write the table of results to sweep.tsv, and print it with the best group of variants."""
    path = Path(grid.run_dir) / "sweep.tsv"
    table, best = results(grid, variants)
    write_out("run_dir", path, "".join("\t".join(row) + "\n" for row in table))
    print("\n".join(aligned(table, left=range(len(table[0])))))
    named = {name for variant in variants for each in records_of(run_dir_of(variant)) for name in each}
    if named and grid.metric not in named:
        hint = did_you_mean(grid.metric, named) or f": it may be {', '.join(sorted(named))}"
        print(f"warning: no record has the metric {plain(grid.metric)}{hint}")
    if best is not None:
        print(f"best by {grid.metric} ({grid.mode}): {best}")
    print(f"wrote {path}; megavlm report {shlex.quote(grid.run_dir)}/*/ draws the curves")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Train the variants of a run that a grid describes, and compare what came out.",
        epilog="Options that are not listed go to sbatch (--time 2-0).",
        allow_abbrev=False,
    )
    parser.add_argument("grid", type=Path, metavar="GRID.yaml", help="What varies, and what is compared.")
    parser.add_argument(
        "--on", choices=("local", "slurm"), default="local", help="local: train here. slurm: submit one array job."
    )
    parser.add_argument(
        "--parallel", type=count, metavar="K", help="Variants at a time; default: 1 here, no limit on a cluster."
    )
    parser.add_argument("--retry-failed", action="store_true", help="Start variants that failed once more.")
    parser.add_argument("--report", action="store_true", help="Write the results so far, and start nothing.")
    parser.add_argument("--dry-run", action="store_true", help="Check all variants, print them, and start nothing.")
    add_check_options(parser)
    slurm.add_options(parser)
    return parser


def results(grid: Grid, variants: Sequence[Variant]) -> tuple[list[list[str]], str | None]:
    """Return a table of text, header first, with a row for each group of variants; and the name of the best group.

    Variants of a group differ only in their seed; their row has the mean and standard deviation of the metric. The best
    group has the best mean among groups whose variants have all finished; None if there is no such group.
    """
    groups: dict[str, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(variant.group, []).append(variant)
    varied = list(dict.fromkeys(key for variant in variants for key in variant.settings))
    several = len(grid.seeds) > 1
    spread = ["± over seeds"] if several else []
    table = [["variant", *varied, "state", "iteration", grid.metric, *spread, "tokens/s"]]
    finished: dict[str, float] = {}
    for group, same in groups.items():
        states = [state_of(variant) for variant in same]
        reached, values, rates = [], [], []
        for variant in same:
            records = [each for each in records_of(run_dir_of(variant)) if isinstance(each.get("iteration"), int)]
            reached.append(records[-1]["iteration"] if records else 0)
            if metric := [value for each in records if (value := number(each.get(grid.metric))) is not None]:
                values.append(statistics.fmean(metric[-grid.average_last :]))
            if speeds := [rate for each in records[1:] if (rate := number(each.get("tokens_per_second")))]:
                rates.append(statistics.median(speeds))
        counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        row = [group, *(same[0].settings.get(key, "") for key in varied)]
        row += [states[0] if len(set(states)) == 1 else counted, str(min(reached))]
        row.append(f"{statistics.fmean(values):.5g}" if values else "")
        if several:
            row.append(f"{statistics.stdev(values):.5g}" if len(values) > 1 else "")
        table.append([*row, f"{statistics.fmean(rates):.0f}" if rates else ""])
        if values and set(states) == {"finished"}:
            finished[group] = statistics.fmean(values)
    best = (min if grid.mode == "min" else max)(finished, key=lambda group: finished[group], default=None)
    return table, best
