"""A job, the commands that start it, and the file that says how it ended."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megavlm.command_line.commands import count

GRACE = 240  # seconds for the last step and its save
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # what a launcher passes on to its agents
VARIABLE = "MEGAVLM_EXIT_FILE"  # names the file of the exit status, on storage that all nodes share


def program() -> tuple[str, ...]:
    """Return the program that torchrun starts: the clone's script, or in another folder the installed package."""
    return ("pretrain_vlm.py",) if Path("pretrain_vlm.py").exists() else ("-m", "megavlm", "train")


@dataclass(frozen=True)
class Job:
    """A run on machines that are alike."""

    nodes: int
    processes: int  # per node, one for each GPU
    flags: tuple[str, ...]  # of pretrain_vlm.py

    @property
    def world(self) -> int:
        return self.nodes * self.processes


@dataclass(frozen=True)
class Command:
    """A command, and the variables that it gets beside those of its parent."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.words)])


def agent(job: Job, node: int, *, address: str, port: int, grace: int = GRACE) -> Command:
    """Return the command of machine `node`'s agent. All agents meet at `address` and `port`, on machine 0.

    The rendezvous is static: ranks follow the numbers of the machines. torchrun reads $$ as $ in what it starts, and
    ${local_rank} as a number. It would die of SIGUSR1, and would kill its ranks 30 s after a signal; torch before 2.12
    does so all the same, and does not know the option in place of the variable.
    """
    words = (
        *(sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", str(job.nodes), "--node-rank", str(node)),
        *("--nproc-per-node", str(job.processes), "--master-addr", address, "--master-port", str(port)),
        *("--signals-to-handle", ",".join(each.name for each in SIGNALS)),
        *(*program(), *(flag.replace("$", "$$") for flag in job.flags)),
    )
    return Command(words, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace)})


class Children:
    """Processes in sessions of their own, to which this one passes on the signals that it gets, from now on."""

    def __init__(self) -> None:
        self.asked = False  # whether a signal has come
        self._running: list[subprocess.Popen[bytes]] = []
        self._before = {number: signal.signal(number, self._pass_on) for number in SIGNALS}

    def start(self, command: Command, **more: Any) -> subprocess.Popen[bytes]:
        """Start a command; `more` are arguments of Popen."""
        environment = {**os.environ, **command.environment}
        started = subprocess.Popen(command.words, env=environment, start_new_session=True, **more)
        self._running.append(started)
        if self.asked:  # before it was known
            started.send_signal(signal.SIGTERM)
        return started

    def _pass_on(self, number: int, _: Any) -> None:
        self.asked = True
        for each in self._running:
            if each.poll() is None:
                each.send_signal(number)

    def leave(self) -> None:
        """Handle signals as before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def add_agent_options(parser: argparse.ArgumentParser) -> None:
    """Add what a machine of a job is told: how long its agent may save, and how often it is started again."""
    parser.add_argument(
        "--grace",
        type=count,
        default=GRACE,
        metavar="SECONDS",
        help="Time for the last step and its save after a signal.",
    )
    parser.add_argument(
        "--max-crashes", type=int, default=10, metavar="N", help="Crashes that are answered by a new attempt."
    )


def note_exit(status: int, environment: Mapping[str, str]) -> None:
    """Write this rank's exit status to the file that the environment names, unless another rank was first: torchrun
    itself ends with 1 whenever a rank does not return 0.
    """
    if path := environment.get(VARIABLE):
        with suppress(OSError), open(path, "x") as file:
            file.write(str(status))


def note_cause(line: str, environment: Mapping[str, str]) -> None:
    """Write why this rank fails to the file from which torchrun takes the last lines that it prints, if it started this
    process. The rank that failed first gives the cause.
    """
    if path := environment.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": message}, file)


def read_exit(path: Path) -> int | None:
    """Return the exit status of the first rank that ended by itself; None if none did."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
