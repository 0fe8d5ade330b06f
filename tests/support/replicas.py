"""Platforms that run one container per machine, on this host: Vertex AI and a Job of Kubernetes, for tests.

A container is `python -m megavlm.programs.launch.node` with the environment that the platform documents, and what
follows its end is what the platform does: Vertex AI starts a replica again at once, five times at most
(https://cloud.google.com/vertex-ai/docs/training/understanding-training-service); a Job replaces a pod, or fails as a
whole, as its podFailurePolicy says.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tests.support.forked import PATIENCE, ROOT
from tests.support.torchrun import kill_tree, last_iteration

Answer = Literal["again", "fail"]


class Platform:
    """The containers of a job; a context manager that leaves none behind.

    Args:
        environments: of each container, beside that of this process.
        answer: what follows the end of a container, given its exit status (negative: a signal) and how often it ended.
    """

    def __init__(
        self,
        argv: Sequence[str],
        run_dir: Path,
        environments: Sequence[Mapping[str, str]],
        answer: Callable[[int, int], Answer],
    ) -> None:
        self.run_dir, self._argv, self._environments, self._answer = run_dir, argv, environments, answer
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ended = [0] * len(environments)
        self.statuses: list[tuple[int, int]] = []  # number and exit status of each container that ended
        self.output_file = run_dir.with_suffix(".out")

    def __enter__(self) -> Platform:
        for number in range(len(self._environments)):
            self._start(number)
        return self

    def __exit__(self, *_: object) -> None:
        for container in self._running.values():
            kill_tree(container.pid)
            container.wait()

    def _start(self, number: int) -> None:
        with self.output_file.open("ab") as output:
            self._running[number] = subprocess.Popen(
                [sys.executable, "-m", "megavlm.programs.launch.node", *self._argv],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self._environments[number]},
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def lose(self, number: int) -> None:
        """End a container and all that it started, as a machine does that loses its power."""
        kill_tree(self._running[number].pid)

    def send(self, number: int, which: signal.Signals) -> None:
        self._running[number].send_signal(which)

    def wait_for_iteration(self, iteration: int) -> None:
        """Let the platform do its work until the run has written the metrics of an iteration."""
        self._work(lambda: last_iteration(self.run_dir) >= iteration)

    def end(self) -> int:
        """Let the platform do its work until the job has ended; return 0, or the status that failed it."""
        self._work(lambda: False)
        return self.statuses[-1][1]

    def _work(self, until: Callable[[], bool]) -> None:
        """Answer the ends of containers until something is so or the job has ended."""
        limit = time.monotonic() + PATIENCE
        while not until() and self._running:
            assert time.monotonic() < limit, self.output()
            for number, container in list(self._running.items()):
                if (status := container.poll()) is None:
                    continue
                del self._running[number]
                self.statuses.append((number, status))
                self._ended[number] += 1
                if status == 0:
                    continue
                if self._answer(status, self._ended[number]) == "again":
                    self._start(number)
                else:
                    self.__exit__()
                    self._running = {}
                    return
            time.sleep(0.1)

    def output(self) -> str:
        return self.output_file.read_text(errors="replace")


def vertex(argv: Sequence[str], run_dir: Path, *, replicas: int, processes: int = 1) -> Platform:
    """A CustomJob: one replica in the first pool, the others in the second."""
    ports = free_ports(replicas)
    hosts = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"workerpool0": hosts[:1], "workerpool1": hosts[1:]}
    environments = []
    for number in range(replicas):
        task = {"type": f"workerpool{min(number, 1)}", "index": max(number - 1, 0)}
        spec = {"cluster": cluster, "environment": "cloud", "task": task, "open_ports": [3333]}
        environments.append(
            {
                "CLUSTER_SPEC": json.dumps(spec | {"job": json.dumps({"python_module": "", "job_args": []})}),
                "CLOUD_ML_JOB_ID": "4711",
                # For PyTorch, and of replicas, not of processes.
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ports[0]),
                "RANK": str(number),
                "WORLD_SIZE": str(replicas),
            }
        )
    given = ["--gpus-per-node", str(processes), "--", *argv, "--run-dir", str(run_dir)]
    return Platform(given, run_dir, environments, lambda _, ended: "again" if ended <= 5 else "fail")


def kubernetes(job: Mapping[str, Any], run_dir: Path) -> Platform:
    """An Indexed Job, of which all but names and addresses is as in its manifest."""
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    environments = [{**given, **own, "JOB_COMPLETION_INDEX": str(index)} for index in range(spec["completions"])]

    def answer(status: int, _: int) -> Answer:
        status = status if status >= 0 else 128 - status  # as a shell, and a container, says it
        for rule in spec["podFailurePolicy"]["rules"]:
            if "onExitCodes" in rule and status in rule["onExitCodes"]["values"]:
                return "fail" if rule["action"] == "FailJob" else "again"
        return "again"

    return Platform(container["args"], run_dir, environments, answer)


def free_ports(count: int) -> list[int]:
    """Return ports that are free, with room above each for those of its torchruns."""
    found = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        first = taken.getsockname()[1]
    for number in range(count):
        found.append(20_000 + (first + 100 * number) % 9_000)
    return found
