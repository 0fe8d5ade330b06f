"""Start a run on many machines: `python -m megavlm.launch slurm --nodes 16 -- --config run.yaml --tp 8 --pp 2`."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megavlm.errors import UserError
from megavlm.launch import local, slurm
from megavlm.launch.checks import check_job
from megavlm.launch.configuration import configured
from megavlm.launch.exit_file import read_exit
from megavlm.launch.job import Job

PROFILES = Path("launch/profiles")


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 submitted or finished, 2 a mistake (reported in one line), else that of the run."""
    cut = list(argv).index("--") if "--" in argv else len(argv)
    options, more = _parser().parse_known_args(argv[:cut])
    job = Job(options.nodes, options.gpus_per_node, tuple(argv[cut + 1 :]))
    try:
        _check(options, more, job)
        if options.scheduler == "slurm":
            return _slurm(job, options, more)
        return _local(job, dry_run=options.dry_run)
    except UserError as error:
        print(f"megavlm.launch: {error}", file=sys.stderr)
        return error.status


def _check(options: argparse.Namespace, more: Sequence[str], job: Job) -> None:
    if job.nodes < 1 or job.processes < 1:
        raise UserError("--nodes and --gpus-per-node must be at least 1")
    if more and options.scheduler != "slurm":
        raise UserError(f"{more[0]} is no option of this program: flags of pretrain_vlm.py come after --")
    if options.profile is not None and not (PROFILES / f"{options.profile}.env").exists():
        known = ", ".join(sorted(path.stem for path in PROFILES.glob("*.env")))
        raise UserError(f"--profile {options.profile} is not in {PROFILES}: choose one of {known}")
    config = configured(job.flags, world=job.world)
    check_job(config, job, gpu=options.gpu, shared=options.run_dir_is_shared or options.scheduler == "local")
    if options.gpu is None and options.scheduler != "local":
        print("memory is not checked: name the GPU by --gpu", file=sys.stderr)


def _slurm(job: Job, options: argparse.Namespace, more: Sequence[str]) -> int:
    command = slurm.specification(job, more, profile=options.profile, image=options.image)
    if options.dry_run:
        print(command)
        return 0
    try:
        return subprocess.run(command.words, env={**os.environ, **command.environment}, check=False).returncode
    except FileNotFoundError:
        raise UserError("sbatch is not installed here: submit from a login node of the cluster") from None


def _local(job: Job, *, dry_run: bool) -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        exit_file = Path(folder) / "exit"
        commands = local.specification(job, port=port, exit_file=exit_file)
        if dry_run:
            print(*commands, sep="\n")
            return 0
        statuses = local.run(commands, dict(os.environ))
        ended = read_exit(exit_file)
    return ended if ended is not None else int(any(statuses))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megavlm.launch",
        description="Check a run here, then start it on many machines. Flags of pretrain_vlm.py come after --.",
        epilog="Options that are not listed go to sbatch: --time 2-0 --partition gpu.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "scheduler",
        choices=("slurm", "local"),
        help="slurm: submit launch/slurm.sbatch. local: run one torchrun per node on this machine.",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="Number of machines; default: 1.")
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="GPUs, and so processes, of each; default: 8."
    )
    parser.add_argument("--gpu", help="Check memory by the planner's estimate for this GPU: h100, a100, …")
    parser.add_argument("--profile", metavar="NAME", help="Settings for the network: a file of launch/profiles.")
    parser.add_argument("--image", metavar="IMAGE", help="Container: *.sif runs in Apptainer, others in pyxis.")
    parser.add_argument(
        "--run-dir-is-shared",
        action="store_true",
        help="All nodes see --run-dir, though this machine has it on a disk.",
    )
    parser.add_argument("--dry-run", action="store_true", help="Check, print what would be sent, and send nothing.")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
