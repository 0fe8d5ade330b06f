"""Start a run on many machines: `megavlm launch slurm --nodes 16 -- --config run.yaml --tp 8 --pp 2`."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from megavlm.command_line.commands import Parser, count, reported
from megavlm.command_line.configuration import configured
from megavlm.command_line.words import known_flags
from megavlm.errors import UserError
from megavlm.programs.doctor.machine import gpus_here
from megavlm.programs.launch import kubernetes, slurm, vertex
from megavlm.programs.launch.checks import add_check_options, check_job, pairs, read_profile
from megavlm.programs.launch.job import VARIABLE, Children, Command, Job, add_agent_options, agent, read_exit
from megavlm.rules.load import read_yaml


@reported("launch")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 submitted or finished, 2 a mistake (reported in one line), else the run's status."""
    if argv and argv[0].startswith("--job="):
        argv = [*argv[0].split("=", 1), *argv[1:]]
    if argv[:1] == ["--job"] and len(argv) > 1:
        argv = _words_of_job(Path(argv[1]), argv[2:])
    cut = list(argv).index("--") if "--" in argv else len(argv)
    flags = tuple(argv[cut + 1 :])
    options, more = _parser().parse_known_args(argv[:cut])
    _check(options, more)
    try:
        if options.scheduler == "slurm":
            return slurm.launch(options, more, flags)
        if options.scheduler == "local":
            return _launch_here(options, flags)
        return {"vertex": vertex, "kubernetes": kubernetes}[options.scheduler].launch(options, flags)
    except UserError as error:
        of_torchrun = r"start torchrun with --nproc-per-node \d+"
        if not re.search(of_torchrun, str(error)):
            raise
        ours = "ask for as many by --nodes and --gpus-per-node"
        raise UserError(re.sub(of_torchrun, ours, str(error))) from error


def _words_of_job(path: Path, more: Sequence[str]) -> list[str]:
    """Return the command line that a job file stands for, with `more` options behind its own. Raises UserError."""
    read_yaml(path, what="--job")  # its mistakes, in one line
    job = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # texts alone: 12:00:00 is no number
    if not isinstance(job, dict) or not isinstance(job.get("launch"), str) or not isinstance(job.get("flags"), str):
        raise UserError(f"--job {path} must have `launch: slurm` (vertex, kubernetes, local), and `flags:` of the run")
    if "--" in more:
        raise UserError(f"{path} has the flags of the run: write them there, and here only options of the job")
    words = [job.pop("launch")]
    try:
        flags = shlex.split(job.pop("flags"))
    except ValueError as error:
        raise UserError(f"--job {path}: flags cannot be read: {error}") from None
    for name, value in job.items():
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, str):
                raise UserError(f"--job {path}: {name} must be a value, or a list of values")
            flag = f"--{name.replace('_', '-')}"
            words.append(flag if each == "true" else f"{flag}={each}")
    return [*words, *more, "--", *flags]


def _check(options: argparse.Namespace, more: Sequence[str]) -> None:
    known = known_flags()
    if alien := [word for word in more if options.scheduler != "slurm" or word.partition("=")[0] in known]:
        raise UserError(f"{alien[0]} is no option of this program: flags of the run come after --")
    options.variables = {**read_profile(options.profile), **pairs("--env", getattr(options, "env", []))}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="megavlm launch",
        description="Check a run here, then start it on many machines. Flags of the run come after --.",
        allow_abbrev=False,
    )
    parser.add_argument("--job", metavar="FILE", help="YAML file of such a command: launch/slurm.yaml.")
    schedulers = parser.add_subparsers(dest="scheduler", required=True, metavar="slurm|vertex|kubernetes|local")
    abouts = {
        "slurm": "Submit launch/slurm.sbatch. Options that are not listed go to sbatch.",
        "vertex": "Submit a CustomJob of Vertex AI.",
        "kubernetes": "Create an Indexed Job of Kubernetes.",
        "local": "Run one torchrun per node on this machine.",
    }
    own = {"slurm": slurm.add_options, "vertex": vertex.add_options, "kubernetes": kubernetes.add_options}
    for name, about in abouts.items():
        each = schedulers.add_parser(name, help=about, description=about, allow_abbrev=False)
        _add_shared_options(each)
        if name in own:
            own[name](each)
        if name in ("vertex", "kubernetes"):
            _add_container_options(each)
    return parser


def _add_shared_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=count, default=1, metavar="N", help="Number of machines.")
    parser.add_argument(
        "--gpus-per-node",
        type=count,
        metavar="N",
        help="GPUs (processes) of each; default: 8, or the machine's.",
    )
    add_check_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="Check, print what would be sent, and send nothing.")


def _add_container_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="megavlm", help="Name of the job.")
    parser.add_argument("--image", required=True, help="Container image, of launch/docker/Dockerfile, in a registry.")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="Variable of the containers.")
    parser.add_argument("--service-account", metavar="NAME", help="Account that the containers act as.")
    parser.add_argument(
        "--skip-checks",
        action="store_true",
        help="Do not check the flags here: they name models or data that only the machines there have.",
    )
    add_agent_options(parser)


def _launch_here(given: argparse.Namespace, flags: tuple[str, ...]) -> int:
    """Rehearse a cluster: run one torchrun per node on this machine, each with its own part of the GPUs, or print the
    commands; return the exit status.
    """
    job = Job(given.nodes, given.gpus_per_node or 8, flags)
    check_job(configured(flags, world=job.world), job, gpu=given.gpu, shared=True)
    with tempfile.TemporaryDirectory() as folder:
        exit_file = Path(folder) / "exit"
        commands = _agents_here(job, {**given.variables, VARIABLE: str(exit_file)}, port=_free_port())
        if given.dry_run:
            print(*commands, sep="\n")
            return 0
        children = Children()
        statuses = [each.wait() for each in [children.start(command) for command in commands]]
        ended = read_exit(exit_file)
    return ended if ended is not None else int(any(statuses))


def _agents_here(job: Job, variables: Mapping[str, str], *, port: int) -> tuple[Command, ...]:
    """Return the torchrun command of each node, in the order of the nodes; all torchruns meet at `port`.

    Nodes share the GPUs of CUDA_VISIBLE_DEVICES, by default all of this machine.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = gpus_here() or map(str, range(job.world)) if visible is None else visible.split(",")
    gpus = [each for each in every if each not in ("", "-1")]  # none: nodes of CPUs
    if job.nodes > 1 and 0 < len(gpus) < job.world:
        raise UserError(f"{job.world} processes need a GPU each, and {len(gpus)} are visible: ask for fewer")
    commands = []
    for node in range(job.nodes):
        command = agent(job, node, address="127.0.0.1", port=port)
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[node * job.processes : (node + 1) * job.processes])}
        environment = {**command.environment, **variables, **(own if job.nodes > 1 else {})}
        commands.append(Command(command.words, environment))
    return tuple(commands)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
