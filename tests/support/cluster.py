"""A SLURM cluster of two nodes on this machine, for tests: munged, slurmctld and two slurmd, with files in one folder.

`make cluster-tools` installs Debian's packages. No daemon of the system is used.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.support.forked import PATIENCE, ROOT
from tests.support.torchrun import kill_tree

NODES = ("fake1", "fake2")
GPUS = 2  # per node: files that stand for them
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
missing = [name for name in _PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
needs_cluster = pytest.mark.skipif(
    bool(missing) or os.getuid() != 0, reason=f"no {', '.join(missing) or 'root'}: `make cluster-tools` installs SLURM"
)

_CONF = Path(__file__).with_name("slurm.conf").read_text()


class Cluster:
    """The daemons; a context manager that leaves none of them behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(ROOT),
            "MEGAVLM_PYTHON": sys.executable,
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        self._configure()
        self._start("munged", "--foreground", "--force", *self._munge())
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._start("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        self._wait(lambda: self.ask("sinfo -h -o %D -t idle").strip() == str(len(NODES)), "idle nodes")
        return self

    def __exit__(self, *_: object) -> None:
        self.ask("scancel --quiet --signal=KILL --full --state=RUNNING -u root", check=False)
        for daemon in reversed(self._daemons.values()):
            kill_tree(daemon.pid)
            daemon.wait()

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, name=node)

    def lose_node(self, node: str) -> None:
        """End the daemon of a node and all that it started, as a machine does that loses its power."""
        daemon = self._daemons.pop(node)
        own = [each for each in psutil.process_iter() if _runs_on(each, node)]
        # The daemons of steps first: they would report how their processes ended.
        steps = {pid for pid in map(_step_of, own) if pid is not None}
        for pid in (daemon.pid, *steps, *(each.pid for each in own)):
            kill_tree(pid)
        daemon.wait()

    def ask(self, command: str, *words: str, check: bool = True) -> str:
        """Return what a command of SLURM prints."""
        done = subprocess.run(
            [*command.split(), *words], env=self.env, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *argv: str, **variables: str) -> Job:
        """Submit a batch job; `variables` are added to its environment."""
        done = subprocess.run(
            ["sbatch", "--parsable", *argv],
            env={**self.env, **variables},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip())

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, f"{what}: {self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """Return the last lines of all logs."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{file.name}:\n" + "\n".join(file.read_text().splitlines()[-15:]) for file in files)

    def _start(self, *command: str, name: str | None = None) -> None:
        log = (self.folder / f"{name or command[0]}.out.log").open("ab")
        self._daemons[name or command[0]] = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=self.env,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        log.close()

    def _munge(self) -> Sequence[str]:
        files = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        return [f"--key-file={key}", *(f"--{name}={self.folder / file}" for name, file in files.items())]

    def _configure(self) -> None:
        devices = [self.folder / f"gpu{number}" for number in range(GPUS)]
        for path in (*devices, self.folder / "state", *(self.folder / f"spool-{node}" for node in NODES)):
            path.touch() if path in devices else path.mkdir()
        values = {"host": socket.gethostname().partition(".")[0], "folder": self.folder, "ports": _free_ports(3)}
        conf = _CONF.format(**values, nodes="fake[1-2]", cpus=os.cpu_count(), gpus=GPUS)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text(f"NodeName=fake[1-2] Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        self.folder.chmod(0o755)


class Job:
    """A batch job."""

    def __init__(self, cluster: Cluster, number: str) -> None:
        self.cluster, self.number = cluster, number

    def shown(self) -> dict[str, str]:
        """Return what scontrol shows of the job."""
        words = self.cluster.ask("scontrol show job --oneliner", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def state(self) -> str:
        return self.shown()["JobState"]

    @property
    def restarts(self) -> int:
        return int(self.shown()["Restarts"])

    def output(self) -> str:
        path = Path(self.shown()["StdOut"])
        return f"{path.read_text(errors='replace') if path.exists() else ''}\n{self.cluster.logs()}"

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so; a job that SLURM wants to hold for two minutes starts at once."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, self.output()
            shown = self.shown()
            if shown["JobState"] in _ENDED:  # others come and go: a job that is about to get a signal is "SIGNALING"
                assert condition(), self.output()  # it may have ended since the last look
                return
            if shown["JobState"] == "PENDING" and shown["Reason"] == "BeginTime":
                self.cluster.ask("scontrol update StartTime=now", f"JobId={self.number}", check=False)
            time.sleep(0.2)

    def end(self) -> tuple[str, int]:
        """Wait for the end; return the state and the exit status."""
        self.wait_for(lambda: self.state in _ENDED)
        shown = self.shown()
        return shown["JobState"], int(shown["ExitCode"].partition(":")[0])


def _free_ports(count: int) -> list[int]:
    """Return neighbouring ports that are free."""
    for first in range(17_000, 18_000, 10):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, each in enumerate(sockets):
                each.bind(("127.0.0.1", first + number))
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
        return [first + number for number in range(count)]
    raise AssertionError("no port is free")


def _runs_on(process: psutil.Process, node: str) -> bool:
    """Return whether a process runs in a step of a node."""
    try:
        return process.environ().get("SLURMD_NODENAME") == node
    except psutil.Error:
        return False


def _step_of(process: psutil.Process) -> int | None:
    """Return the number of the daemon of a step, if that started the process itself."""
    try:
        parent = process.parent()
        return parent.pid if parent is not None and parent.name() == "slurmstepd" else None
    except psutil.Error:
        return None
