"""Train the variants of a run and compare them: `megavlm sweep GRID.yaml [--on slurm] [--parallel 5]`.

GRID.yaml says what varies (docs/clusters.md). Before anything starts, the options of every variant are checked. Those
that have finished are skipped, so that the same command goes on after an interruption. The results are a table and
curves: RUN_DIR/sweep.html, sweep.tsv and sweep.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from megavlm.command_line.commands import Parser, reported
from megavlm.errors import UserError
from megavlm.programs.launch.checks import check_job
from megavlm.programs.launch.job import Job
from megavlm.programs.launch.launch import main as launch
from megavlm.programs.launch.profile import read_profile
from megavlm.programs.sweep import array, jobs
from megavlm.programs.sweep.grid import Grid, Variant, check_variants, read_grid, variants_of
from megavlm.programs.sweep.local import train_here
from megavlm.programs.sweep.page import page
from megavlm.programs.sweep.results import as_markdown, as_text, as_tsv, best_of, columns, rows_of
from megavlm.programs.sweep.state import note_flags, note_submitted, state_of, to_train, unsubmitted, write_whole

_EACH = ("vertex", "kubernetes")  # a job for each variant


@reported("sweep")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, or submitted, 2 a mistake (one line), 75 stopped by a signal, 1 failed."""
    options, more = _parser().parse_known_args(argv)
    grid = read_grid(options.grid)
    variants = variants_of(grid)
    if options.report:
        return report(options.grid.stem, grid, variants)
    _check(options, more, grid, variants)
    waiting = to_train(variants, retry_failed=options.retry_failed)
    if options.on in _EACH:
        waiting = unsubmitted(Path(grid.run_dir), waiting, again=options.retry_failed)
    if options.dry_run:
        return dry_run(options, more, grid, variants, waiting)
    note_flags(Path(grid.run_dir), variants)
    failed = sum(state_of(variant) == "failed" for variant in variants if variant not in waiting)
    hint = f"; {failed} failed: --retry-failed starts them again" if failed else ""
    print(f"{len(waiting)} of {len(variants)} variants are to train{hint}", flush=True)
    status = start(options, more, grid, waiting) if waiting else 0
    if options.on == "local" or not waiting:
        report(options.grid.stem, grid, variants)
    return status


def _check(options: argparse.Namespace, more: Sequence[str], grid: Grid, variants: Sequence[Variant]) -> None:
    if more and options.on == "local":
        raise UserError(f"{more[0]} is no option of this program; options of a scheduler need --on")
    read_profile(options.profile)
    if options.parallel is not None and options.on in _EACH:
        raise UserError(f"--parallel does not limit jobs of --on {options.on}: a queue of that service does")
    if options.parallel is not None and options.parallel < 1:
        raise UserError(f"--parallel {options.parallel} must be at least 1")
    if options.on == "local" and grid.nodes > 1:
        raise UserError(f"grid: nodes {grid.nodes} need --on slurm: here a variant trains on this machine")
    job = Job(grid.nodes, grid.processes, ())
    shared = options.on != "slurm" or options.run_dir_is_shared
    check_variants(grid, variants, further=lambda config: check_job(config, job, gpu=options.gpu, shared=shared))


def start(options: argparse.Namespace, more: Sequence[str], grid: Grid, waiting: Sequence[Variant]) -> int:
    """Train or submit the variants that wait; return the exit status."""
    if options.on == "local":
        return train_here(grid, waiting, parallel=options.parallel or 1, say=lambda line: print(line, flush=True))
    if options.on in _EACH:
        words = [_words(options, more, grid, variant) for variant in waiting]
        folder = Path(grid.run_dir)
        return jobs.check_all(launch, words) or jobs.submit_all(
            launch, words, submitted=lambda number: note_submitted(folder, waiting[number])
        )
    array.refuse_second(grid)
    array.write_flags(grid, waiting)
    return array.submit(grid, _command(options, more, grid, waiting), dict(os.environ))


def dry_run(
    options: argparse.Namespace,
    more: Sequence[str],
    grid: Grid,
    variants: Sequence[Variant],
    waiting: Sequence[Variant],
) -> int:
    """Print the state and the flags of each variant, and what would be sent."""
    for variant in variants:
        print(f"{variant.name}  [{state_of(variant)}]  {shlex.join(variant.flags)}")
    print(f"{len(waiting)} of {len(variants)} variants would train")
    if options.on == "slurm" and waiting:
        print(_command(options, more, grid, waiting))
    if options.on in _EACH:
        words = [_words(options, more, grid, variant) for variant in waiting]
        for each in words:
            print(shlex.join(["megavlm", "launch", *each]))
        return jobs.check_all(launch, words)
    return 0


def _words(options: argparse.Namespace, more: Sequence[str], grid: Grid, variant: Variant) -> list[str]:
    given = {"--gpu": options.gpu, "--profile": options.profile, "--image": options.image}
    own = [word for name, value in given.items() if value is not None for word in (name, value)]
    return jobs.command(options.on, grid, variant, [*own, *more], title=options.grid.stem)


def _command(options: argparse.Namespace, more: Sequence[str], grid: Grid, waiting: Sequence[Variant]) -> array.Command:
    return array.specification(
        grid, waiting, more, parallel=options.parallel or 0, profile=options.profile, image=options.image
    )


def report(title: str, grid: Grid, variants: Sequence[Variant]) -> int:
    """Write the table and the page, and print the table and the best variant."""
    rows, folder = rows_of(grid, variants), Path(grid.run_dir)
    table = columns(grid, rows)
    write_whole(folder / "sweep.tsv", as_tsv(table))
    write_whole(folder / "sweep.md", as_markdown(table))
    write_whole(folder / "sweep.html", page(title, grid, rows))
    best = best_of(rows, mode=grid.mode)
    print(as_text(table))
    if best is not None:
        print(f"best by {grid.metric} ({grid.mode}): {best.group}")
    print(f"wrote {folder / 'sweep.html'}, sweep.tsv and sweep.md")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Train the variants of a run that a grid describes, and compare what came out.",
        epilog="Options that are not listed go to sbatch (--time 2-0), or to `megavlm launch vertex | kubernetes`.",
        allow_abbrev=False,
    )
    parser.add_argument("grid", type=Path, metavar="GRID.yaml", help="What varies, and what is compared.")
    parser.add_argument(
        "--on",
        choices=("local", "slurm", *_EACH),
        default="local",
        help="local: train here. slurm: submit one array job. vertex, kubernetes: submit a job for each variant. "
        "Default: local.",
    )
    parser.add_argument(
        "--parallel", type=int, metavar="K", help="Variants at a time; default: 1 here, no limit on a cluster."
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
