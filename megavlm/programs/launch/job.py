"""A job of several machines, the torchrun command of each machine, and the file of the job's exit status."""

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
    """Return the program that torchrun starts: pretrain_vlm.py in a clone, elsewhere the installed package."""
    return ("pretrain_vlm.py",) if Path("pretrain_vlm.py").exists() else ("-m", "megavlm", "train")


@dataclass(frozen=True)
class Job:
    """A run on machines with equal numbers of GPUs."""

    nodes: int
    processes: int  # per node, one for each GPU
    flags: tuple[str, ...]  # of pretrain_vlm.py

    @property
    def world(self) -> int:
        return self.nodes * self.processes


@dataclass(frozen=True)
class Command:
    """A command, and the environment variables that it gets in addition to those of its parent."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.words)])


def agent(job: Job, node: int, *, address: str, port: int, grace: int = GRACE) -> Command:
    """Return the torchrun command of machine `node`. All torchruns meet at `address` and `port`, on machine 0.

    The rendezvous is static: ranks follow the numbers of the machines. torchrun reads $$ as $ in the arguments of its
    program, and ${local_rank} as a number. By default torchrun dies of SIGUSR1, and kills its ranks 30 s after a
    signal. The grace period is set by a variable, because torch before 2.12 does not know --shutdown-timeout; these
    versions ignore the variable and keep the 30 s.
    """
    words = (
        *(sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", str(job.nodes), "--node-rank", str(node)),
        *("--nproc-per-node", str(job.processes), "--master-addr", address, "--master-port", str(port)),
        *("--signals-to-handle", ",".join(each.name for each in SIGNALS)),
        *(*program(), *(flag.replace("$", "$$") for flag in job.flags)),
    )
    return Command(words, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace)})


class Children:
    """Child processes in sessions of their own. From construction on, this process forwards its signals to them."""

    def __init__(self) -> None:
        self.asked = False  # whether a signal has come
        self._running: list[subprocess.Popen[bytes]] = []
        self._before = {number: signal.signal(number, self._pass_on) for number in SIGNALS}

    def start(self, command: Command, **more: Any) -> subprocess.Popen[bytes]:
        """Start a command and return its process; `more` are arguments of Popen."""
        environment = {**os.environ, **command.environment}
        started = subprocess.Popen(command.words, env=environment, start_new_session=True, **more)
        self._running.append(started)
        if self.asked:  # a signal came before this process was in the list
            started.send_signal(signal.SIGTERM)
        return started

    def _pass_on(self, number: int, _: Any) -> None:
        self.asked = True
        for each in self._running:
            if each.poll() is None:
                each.send_signal(number)

    def leave(self) -> None:
        """Restore the signal handlers that were set before construction."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def add_agent_options(parser: argparse.ArgumentParser) -> None:
    """Add --grace, the time for a last save after a signal, and --max-crashes, the limit on restarts."""
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
    """Write this rank's exit status to the file named by MEGAVLM_EXIT_FILE, unless another rank has written its own.

    torchrun itself exits with 1 whenever a rank does not return 0.
    """
    if path := environment.get(VARIABLE):
        with suppress(OSError), open(path, "x") as file:
            file.write(str(status))


def note_cause(line: str, environment: Mapping[str, str]) -> None:
    """Write why this rank fails to the error file of torchrun, if torchrun started this process.

    torchrun prints the message of the rank that failed first.
    """
    if path := environment.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": message}, file)


def read_exit(path: Path) -> int | None:
    """Return the exit status of the first rank that exited on its own; None if no rank did."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
