"""Train the variants of a run and compare them: `megavlm sweep GRID.yaml [--on slurm] [--parallel 5]`.

GRID.yaml says what varies (docs/clusters.md). Before anything starts, the options of every variant are checked. Those
that have finished are skipped, so that the same command goes on after an interruption. The result is
a table, RUN_DIR/sweep.tsv.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megavlm.command_line.commands import Parser, count, reported
from megavlm.config.messages import aligned
from megavlm.errors import UserError
from megavlm.programs.history import number, records_of
from megavlm.programs.launch import slurm
from megavlm.programs.launch.checks import check_job, read_profile
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
    write_whole,
)


@reported("sweep")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, or submitted, 2 a mistake (one line), 75 stopped by a signal, 1 failed."""
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
    if options.on == "local" and grid.nodes > 1:
        raise UserError(f"grid: nodes {grid.nodes} need --on slurm: here a variant trains on this machine")
    job = Job(grid.nodes, grid.processes, ())
    shared = options.on != "slurm" or options.run_dir_is_shared
    check_variants(grid, variants, further=lambda config: check_job(config, job, gpu=options.gpu, shared=shared))


def start(options: argparse.Namespace, more: Sequence[str], grid: Grid, waiting: Sequence[Variant]) -> int:
    """Train or submit the variants that wait; return the exit status."""
    if options.on == "local":
        return train_here(grid, waiting, parallel=options.parallel or 1, say=lambda line: print(line, flush=True))
    write_flags(grid, waiting)
    return slurm.submit(_command(options, more, grid, waiting))


def _command(options: argparse.Namespace, more: Sequence[str], grid: Grid, waiting: Sequence[Variant]) -> Command:
    parallel = options.parallel or 0
    return array_command(grid, waiting, more, parallel=parallel, profile=options.profile, image=options.image)


def report(grid: Grid, variants: Sequence[Variant]) -> None:
    """Write the table, and print it with the best variant."""
    rows, path = rows_of(grid, variants), Path(grid.run_dir) / "sweep.tsv"
    table = columns(grid, rows)
    write_whole(path, "".join("\t".join(row) + "\n" for row in table))
    best = best_of(rows, mode=grid.mode)
    print("\n".join(aligned(table, left=range(len(table[0])))))
    if best is not None:
        print(f"best by {grid.metric} ({grid.mode}): {best.group}")
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
    parser.add_argument("--gpu", help="Check memory by the planner's estimate for this GPU: h100, a100, …")
    parser.add_argument("--profile", metavar="NAME", help="Settings for the network: a file of launch/profiles.")
    parser.add_argument("--image", metavar="IMAGE", help="Container: *.sif runs in Apptainer, others in pyxis.")
    parser.add_argument(
        "--run-dir-is-shared", action="store_true", help="All nodes see run_dir, though this machine has it on a disk."
    )
    return parser


@dataclass(frozen=True)
class Row:
    """What the variants of one group came to: they differ in their seed. Numbers are None as long as there are none."""

    group: str
    settings: Mapping[str, str]
    states: str  # the state that all are in, or the number of runs in each state
    iteration: int  # that all have reached
    mean: float | None
    spread: float | None  # standard deviation over seeds; None with fewer than two
    tokens_per_second: float | None


def rows_of(grid: Grid, variants: Sequence[Variant]) -> list[Row]:
    """Return a row for each group, in the order of the grid, from the run folders."""
    groups: dict[str, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(variant.group, []).append(variant)
    return [_row(grid, group, same) for group, same in groups.items()]


def _row(grid: Grid, group: str, variants: Sequence[Variant]) -> Row:
    states = [state_of(variant) for variant in variants]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    reached, values, rates = [], [], []
    for variant in variants:
        records = [each for each in records_of(run_dir_of(variant)) if isinstance(each.get("iteration"), int)]
        reached.append(records[-1]["iteration"] if records else 0)
        if metric := [value for each in records if (value := number(each.get(grid.metric))) is not None]:
            values.append(statistics.fmean(metric[-grid.average_last :]))
        if speeds := [rate for each in records[1:] if (rate := number(each.get("tokens_per_second")))]:
            rates.append(statistics.median(speeds))
    return Row(
        group=group,
        settings=variants[0].settings,
        states=states[0] if len(set(states)) == 1 else counted,
        iteration=min(reached),
        mean=statistics.fmean(values) if values else None,
        spread=statistics.stdev(values) if len(values) > 1 else None,
        tokens_per_second=statistics.fmean(rates) if rates else None,
    )


def best_of(rows: Sequence[Row], *, mode: str) -> Row | None:
    """Return the row with the best mean among those whose variants have all finished; None if there is none."""
    done = [row for row in rows if row.mean is not None and row.states == "finished"]
    return (min if mode == "min" else max)(done, key=lambda row: row.mean or 0.0, default=None)


def columns(grid: Grid, rows: Sequence[Row]) -> list[list[str]]:
    """Return the table as text, the head first."""
    varied = list(dict.fromkeys(key for row in rows for key in row.settings))
    several = len(grid.seeds) > 1
    spread = ["± over seeds"] if several else []
    table = [["variant", *varied, "state", "iteration", grid.metric, *spread, "tokens/s"]]
    for row in rows:
        cells = [row.group, *(row.settings.get(key, "") for key in varied), row.states, str(row.iteration)]
        numbers = [row.mean, *([row.spread] if several else [])]
        cells += ["" if value is None else f"{value:.5g}" for value in numbers]
        table.append([*cells, "" if row.tokens_per_second is None else f"{row.tokens_per_second:.0f}"])
    return table
