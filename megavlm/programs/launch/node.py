"""Run this machine's part of a job, where a platform starts one container per machine (Vertex AI, Kubernetes).

    python -m megavlm.programs.launch.node --gpus-per-node 8 -- FLAGS

FLAGS are the options of pretrain_vlm.py. One torchrun runs on each machine; `world.py` finds the machine's number and
the number of machines. An attempt begins when all machines are there, and ends on all of them when one machine is lost
or its ranks end. After a crash or the loss of a machine, the job resumes from its newest checkpoint; machine 0 records
the attempts (`attempt.py`).

The exit status tells the platform what to do: 0: the run has finished; 75: the platform asked for this machine, and
should start another container in its place; 1, 2 and 3: the machines have decided to end the job, and a retry would
not help.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megavlm.command_line.configuration import configured
from megavlm.errors import UserError
from megavlm.programs.launch.attempt import Account, Decision, End, end_of
from megavlm.programs.launch.job import VARIABLE, Children, Command, Job, add_agent_options, agent, read_exit
from megavlm.programs.launch.meeting import Guest, MachinePart, MeetingHost, Parts
from megavlm.resilience.events import STOPPED
from megavlm.world import Node, node_of

JOB = "MEGAVLM_JOB"  # name of the job, the same for all its attempts and different for every other job
_PATIENCE = 30.0  # seconds in which ranks that lost others exit on their own, with their own error messages
_PORTS = 64  # successive attempts use different ports, so that their torchruns do not meet


class _Asked(Exception):
    """Raised when the platform asks for this machine."""


def main(argv: Sequence[str]) -> int:
    """Run this machine's part of the job and return the exit status for the container."""
    cut = argv.index("--") if "--" in argv else len(argv)
    options, flags = _parser().parse_args(argv[:cut]), argv[cut + 1 :]
    try:
        node = node_of(os.environ)
        job = Job(node.nodes, options.gpus_per_node, tuple(flags))
        configured(flags, world=job.world)
        return _run(job, node, grace=options.grace, max_crashes=options.max_crashes)
    except _Asked:
        print("asked to stop before an attempt began", flush=True)
        return STOPPED
    except (UserError, OSError) as error:
        print(f"megavlm.programs.launch.node: {error}", file=sys.stderr, flush=True)
        return error.status if isinstance(error, UserError) else 2


def _run(job: Job, node: Node, *, grace: int, max_crashes: int) -> int:
    name = os.environ.get(JOB) or os.environ.get("CLOUD_ML_JOB_ID") or "job"
    account = Account.of(job.flags, name)
    children = Children()

    def look() -> None:
        if children.asked:
            raise _Asked

    meeting: MeetingHost | Guest
    if node.number == 0:
        if "CLOUD_ML_JOB_ID" in os.environ:  # Vertex AI restarts a container whatever its exit status
            last = account.decided(max_crashes=max_crashes)
            if last is not None and not last.again:
                return _status(last, job=name)

        def decide(parts: Parts) -> Decision:
            return account.end(warned=True, max_crashes=max_crashes, end=outcome(parts))

        meeting = MeetingHost(node, name, decide=decide, patience=grace + _PATIENCE)
    else:
        meeting = Guest(node, name)
    try:
        while True:
            number = meeting.begin(look)
            if node.number == 0:
                account.begin(max_crashes=max_crashes, unfinished="lost")
            print(f"attempt {number} of machine {node.number + 1} of {node.nodes} begins", flush=True)
            command = agent(job, node.number, address=node.address, port=node.port + 1 + number % _PORTS, grace=grace)
            status = _attempt(command, meeting, children, grace=grace)
            decision = meeting.agree(MachinePart(status, gone=children.asked))
            if not decision.again:
                return _status(decision, job=name)
            print(f"job {name} goes on: {decision.reason}", file=sys.stderr, flush=True)
            look()
    finally:
        meeting.close()


def _attempt(command: Command, meeting: MeetingHost | Guest, children: Children, *, grace: int) -> int | None:
    """Run this machine's torchrun; return the status of the first rank that exited on its own, None if no rank did.

    When the part of another machine ends, the ranks here cannot go on. They are killed if they have not exited after
    `_PATIENCE` seconds (after a crash or the loss of a machine), else after `grace` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        exit_file = Path(folder) / "exit"
        running = children.start(Command(command.words, {**command.environment, VARIABLE: str(exit_file)}))
        limit: float | None = None
        while running.poll() is None:
            if limit is None and (over := meeting.over()) is not None:
                limit = time.monotonic() + (_PATIENCE if over[0] is None else grace)
            if limit is not None and time.monotonic() > limit:
                _kill(running.pid)
            time.sleep(0.2)
        return 0 if running.returncode == 0 else read_exit(exit_file)


def _kill(pid: int) -> None:
    """Kill a torchrun, its ranks and their data workers, which run in sessions of their own."""
    with suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(psutil.Error):
                process.kill()


def outcome(parts: Parts) -> End:
    """Return how an attempt ended, given how the part of each machine ended.

    A mistake or bad numbers on one machine decide for the whole attempt. Ranks of the other machines may exit in any
    way once a machine is lost or a rank crashes, so that their ends count less.
    """
    ends = [end_of(part.status) for part in parts.values()]
    if "mistake" in ends or "bad numbers" in ends:
        return "mistake" if "mistake" in ends else "bad numbers"
    if all(end == "finished" for end in ends):
        return "finished"
    if any(part.gone for part in parts.values()):
        return "lost"
    return "stopped" if "stopped" in ends else "crash"


def _status(decision: Decision, *, job: str) -> int:
    print(f"job {job} ends: {decision.reason}", file=sys.stderr, flush=True)
    return 1 if decision.status == STOPPED else decision.status  # 75 would start another container in its place


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megavlm.programs.launch.node",
        description="Run this machine's part of a job on Vertex AI or Kubernetes.",
    )
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="GPUs, and so processes, of a machine."
    )
    add_agent_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
