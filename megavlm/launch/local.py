"""Run nodes as so many agents of torchrun on this machine, each with its part of the GPUs: a rehearsal of a cluster."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megavlm.launch.exit_file import VARIABLE
from megavlm.launch.job import Command, Job, program

GRACE = 240  # seconds for the last step and its save
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def specification(job: Job, *, port: int, exit_file: Path) -> tuple[Command, ...]:
    """Return the command of each node's agent, by number of the node; they meet at `port`."""
    return tuple(_agent(job, node, port=port, exit_file=exit_file) for node in range(job.nodes))


def _agent(job: Job, node: int, *, port: int, exit_file: Path) -> Command:
    first = node * job.processes
    variables = {VARIABLE: str(exit_file)}
    if job.nodes > 1:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(first + number) for number in range(job.processes))
    return Command(
        (
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(job.nodes), "--node-rank", str(node)),
            *("--nproc-per-node", str(job.processes), "--master-addr", "127.0.0.1", "--master-port", str(port)),
            # It would die of SIGUSR1, and would kill its ranks 30 s after a signal.
            *("--signals-to-handle", ",".join(each.name for each in SIGNALS), "--shutdown-timeout", str(GRACE)),
            *(*program(), *job.flags),
        ),
        variables,
    )


def run(commands: Sequence[Command], environment: dict[str, str]) -> list[int]:
    """Run all commands beside one another, pass signals on to them, and return their exit statuses."""
    agents = [
        subprocess.Popen(command.words, env={**environment, **command.environment}, start_new_session=True)
        for command in commands
    ]

    def pass_on(number: int, _: Any) -> None:
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    return [agent.wait() for agent in agents]
