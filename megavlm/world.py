"""Read rank, world size and node number of this process from the variables of any launcher. Without torch.

torchrun and clusters that follow its names set RANK, WORLD_SIZE and LOCAL_RANK; SLURM's srun and MPI's launchers set
variables of their own. A process that ignored them would train alone as rank 0 of 1, like each of the others.

Where a platform starts one program on each machine, `node_of` returns this machine's number: Vertex AI describes all
replicas of a job in CLUSTER_SPEC; an Indexed Job of Kubernetes numbers its pods in JOB_COMPLETION_INDEX. Neither sets
ranks of processes: each machine starts its own (`megavlm.programs.launch.node`). Format of CLUSTER_SPEC:
https://cloud.google.com/vertex-ai/docs/training/distributed-training
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megavlm.errors import UserError

_HERE = "127.0.0.1"
_PORT = 29500  # torchrun's default
_SLURM_PORTS = range(15_000, 30_000)  # below those that Linux gives to outgoing connections


@dataclass(frozen=True)
class World:
    """Rank, world size and rendezvous of this process. Rank 0 listens at `address` and `port` for the others."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = 1  # processes on this machine; None if nothing says how many
    address: str = _HERE
    port: int = _PORT

    def environment(self) -> dict[str, str]:
        """Return the same values as torchrun's environment variables."""
        local = {} if self.local_world_size is None else {"LOCAL_WORLD_SIZE": str(self.local_world_size)}
        return local | {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


class _Launcher(NamedTuple):
    """The names of a launcher's variables for ranks and sizes."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_SRUN = _Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
# In this order: torchrun runs under all others, and mpirun and mpiexec start one process of their own per node by srun.
# A batch script and an interactive shell of SLURM have SLURM_PROCID, but are no tasks of a step: they start others.
_LAUNCHERS = (
    _Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),  # Open MPI
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    _SRUN,
)


def world_of(environment: Mapping[str, str]) -> World:
    """Return this process's rank and world from the environment; a world of one if no launcher's variables are set.

    Raises UserError, in one line, if a variable is missing or is no number.
    """
    launcher = next((each for each in _LAUNCHERS if environment.keys() >= {*each[:3]}), None)
    if launcher is None:
        return _alone(environment)
    rank, size, local_rank = (whole_number(environment, name) for name in launcher[:3])
    local_size = _local_size(environment, launcher)
    if size < 1 or rank >= size:
        raise UserError(f"{launcher.rank}={rank} must be below {launcher.world_size}={size}: {_REMEDY}")
    address = _address(environment, launcher, one_machine=size in (1, local_size))
    return World(rank, size, local_rank, local_size, address, _port(environment, launcher))


_REMEDY = "start the program by torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR for each process"


def _alone(environment: Mapping[str, str]) -> World:
    """Return a world of one. Raises UserError if the environment indicates other processes or machines."""
    for each in _LAUNCHERS:
        if each is _SRUN or environment.get(each.world_size) == "1":
            continue
        if given := ", ".join(name for name in each[:3] if name in environment):
            missing = ", ".join(name for name in each[:3] if name not in environment)
            raise UserError(f"the environment has {given} and no {missing}: {_REMEDY}")
    if ("CLUSTER_SPEC" in environment or NODES in environment) and (nodes := node_of(environment).nodes) > 1:
        raise UserError(
            f"this is one of {nodes} machines of a job: start each by python -m megavlm.programs.launch.node"
        )
    return World()


def _local_size(environment: Mapping[str, str], launcher: _Launcher) -> int | None:
    if launcher.local_world_size not in environment:
        return None
    if launcher is not _SRUN:
        return whole_number(environment, launcher.local_world_size)
    if "SLURM_NODEID" not in environment:
        return None
    return _tasks_of(whole_number(environment, "SLURM_NODEID"), environment[launcher.local_world_size])


def _tasks_of(node: int, text: str) -> int | None:
    """Return the count of a node in SLURM's notation: 4 of the node 2 in "8(x2),4"; None if the text lacks it."""
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        if node < (nodes := int(match[2] or 1)):
            return int(match[1])
        node -= nodes
    return None


def _address(environment: Mapping[str, str], launcher: _Launcher, *, one_machine: bool) -> str:
    if given := environment.get("MASTER_ADDR"):
        return given
    if one_machine:
        return _HERE
    if launcher is _SRUN:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
        if found := _first_host(nodes) if nodes else environment.get("SLURM_LAUNCH_NODE_IPADDR"):
            return found
    raise UserError("MASTER_ADDR is not set: set it to the address of rank 0's machine for all processes")


def _first_host(nodes: str) -> str:
    """Return the first name of a host list of SLURM, on whose node task 0 runs: "gpu007" of "gpu[007-009,12],big1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else nodes


def _port(environment: Mapping[str, str], launcher: _Launcher) -> int:
    """Return MASTER_PORT; without it a port of this step's own under srun, and torchrun's default elsewhere."""
    if given := _given_port(environment):
        return given
    if launcher is _SRUN and "SLURM_JOB_ID" in environment:
        # The port differs between jobs that share a node, and between steps of one job that run at the same time.
        step = whole_number(environment, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environment else 0
        return _SLURM_PORTS[(whole_number(environment, "SLURM_JOB_ID") + 1009 * step) % len(_SLURM_PORTS)]
    return _PORT


NODES = "MEGAVLM_NODES"  # Kubernetes tells a pod its number, and not how many pods there are
_TRAINING = ("workerpool0", "workerpool1")  # pool 2 has Vertex AI's reducers, pool 3 evaluators


@dataclass(frozen=True)
class Node:
    """Number and rendezvous of this machine in a job. Machine 0 listens at `address` and `port` for the others."""

    number: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = _PORT


def node_of(environment: Mapping[str, str]) -> Node:
    """Return this machine's number in the job from the environment; a single machine if no variables are set.

    Raises UserError, in one line, if a variable is missing, is malformed, or contradicts another.
    """
    if "CLUSTER_SPEC" in environment:
        return _vertex(environment)
    if NODES in environment:
        return _kubernetes(environment)
    if "JOB_COMPLETION_INDEX" in environment:
        raise UserError(f"JOB_COMPLETION_INDEX is set and {NODES} is not: set it to the `completions` of the job")
    return Node()


def _vertex(environment: Mapping[str, str]) -> Node:
    text = environment["CLUSTER_SPEC"]
    try:
        spec: dict[str, Any] = json.loads(text)
        cluster = {str(pool): [str(each) for each in hosts] for pool, hosts in spec["cluster"].items()}
        pool, index = str(spec["task"]["type"]), int(spec["task"]["index"])
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"CLUSTER_SPEC={text!r} has no cluster and task as Vertex AI describes them") from None
    if pool not in cluster or not 0 <= index < len(cluster[pool]):
        raise UserError(f"CLUSTER_SPEC has no replica {index} in {pool}, which its task says this is")
    if sum(map(len, cluster.values())) == 1:
        return Node()
    if pool not in _TRAINING:
        raise UserError(f"this replica is in {pool}; only those of {' and '.join(_TRAINING)} train")
    hosts = [host for name in _TRAINING for host in cluster.get(name, [])]
    number = index if pool == _TRAINING[0] else len(cluster.get(_TRAINING[0], [])) + index
    host, _, port = hosts[0].rpartition(":")
    return Node(
        number,
        len(hosts),
        environment.get("MASTER_ADDR") or host or hosts[0],
        _given_port(environment) or (int(port) if host and port.isdecimal() else _PORT),
    )


def _kubernetes(environment: Mapping[str, str]) -> Node:
    nodes = whole_number(environment, NODES)
    number = whole_number(environment, "JOB_COMPLETION_INDEX")
    if number >= nodes:
        raise UserError(f"JOB_COMPLETION_INDEX={number} must be below {NODES}={nodes}")
    if nodes == 1:
        return Node(port=_given_port(environment) or _PORT)
    if not environment.get("MASTER_ADDR"):
        raise UserError("MASTER_ADDR is not set: set it to the name of the job's first pod for all pods")
    return Node(number, nodes, environment["MASTER_ADDR"], _given_port(environment) or _PORT)


def _given_port(environment: Mapping[str, str]) -> int | None:
    if not environment.get("MASTER_PORT"):
        return None
    port = whole_number(environment, "MASTER_PORT")
    if not 0 < port < 65_536:
        raise UserError(f"MASTER_PORT={port} must be from 1 to 65535")
    return port


def whole_number(environment: Mapping[str, str], name: str) -> int:
    """Return the whole number in a variable. Raises UserError if it holds none."""
    text = environment.get(name, "")
    if not text.isdecimal():
        raise UserError(f"{name}={text!r} must be a whole number")
    return int(text)
