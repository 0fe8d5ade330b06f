"""Rehearse a cluster on this machine: run one torchrun per node, each with its own part of the GPUs."""

from __future__ import annotations

import argparse
import socket
import tempfile
from pathlib import Path

from megavlm.command_line.configuration import configured
from megavlm.programs.launch.checks import check_job
from megavlm.programs.launch.job import VARIABLE, Children, Command, Job, agent, read_exit


def launch(given: argparse.Namespace, flags: tuple[str, ...]) -> int:
    """Check a job and run it here, or print the commands; return the exit status."""
    job = Job(given.nodes, given.gpus_per_node or 8, flags)
    check_job(configured(flags, world=job.world), job, gpu=given.gpu, shared=True)
    with tempfile.TemporaryDirectory() as folder:
        exit_file = Path(folder) / "exit"
        commands = specification(job, port=free_port(), exit_file=exit_file)
        if given.dry_run:
            print(*commands, sep="\n")
            return 0
        children = Children()
        statuses = [each.wait() for each in [children.start(command) for command in commands]]
        ended = read_exit(exit_file)
    return ended if ended is not None else int(any(statuses))


def specification(job: Job, *, port: int, exit_file: Path) -> tuple[Command, ...]:
    """Return the torchrun command of each node, in the order of the nodes; all torchruns meet at `port`."""
    commands = []
    for node in range(job.nodes):
        command = agent(job, node, address="127.0.0.1", port=port)
        variables = {**command.environment, VARIABLE: str(exit_file)}
        if job.nodes > 1:
            own = range(node * job.processes, (node + 1) * job.processes)
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, own))
        commands.append(Command(command.words, variables))
    return tuple(commands)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
