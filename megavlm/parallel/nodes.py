"""Find in the environment which of how many machines this is, where a platform starts one program on each. No torch.

Vertex AI describes all replicas of a job in CLUSTER_SPEC; an Indexed Job of Kubernetes numbers its pods in
JOB_COMPLETION_INDEX. Neither knows of processes: each machine starts its own (`megavlm.programs.launch.node`).
Format of CLUSTER_SPEC: https://cloud.google.com/vertex-ai/docs/training/distributed-training
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megavlm.errors import UserError

NODES = "MEGAVLM_NODES"  # Kubernetes tells a pod its number, and not how many pods there are
_TRAINING = ("workerpool0", "workerpool1")  # pool 2 has Vertex AI's reducers, pool 3 evaluators
_PORT = 29500
_DIGITS, _SHOWN = 18, 200  # of a number, and characters of a value that a message has


@dataclass(frozen=True)
class Node:
    """This machine among all machines of a job. Machine 0 listens at `address` and `port` for the others."""

    number: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = _PORT


def node_of(environment: Mapping[str, str]) -> Node:
    """Return this machine's place in the job that its environment describes; the only one where it says nothing.

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
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise UserError(f"CLUSTER_SPEC={text[:_SHOWN]!r} has no cluster and task as Vertex AI describes them") from None
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
        _port(environment) if environment.get("MASTER_PORT") else int(port) if host and port.isdecimal() else _PORT,
    )


def _kubernetes(environment: Mapping[str, str]) -> Node:
    nodes = whole_number(environment, NODES)
    number = whole_number(environment, "JOB_COMPLETION_INDEX")
    if number >= nodes:
        raise UserError(f"JOB_COMPLETION_INDEX={number} must be below {NODES}={nodes}")
    if nodes == 1:
        return Node(port=_port(environment))
    if not environment.get("MASTER_ADDR"):
        raise UserError("MASTER_ADDR is not set: set it to the name of the job's first pod for all pods")
    return Node(number, nodes, environment["MASTER_ADDR"], _port(environment))


def _port(environment: Mapping[str, str]) -> int:
    port = whole_number(environment, "MASTER_PORT") if environment.get("MASTER_PORT") else _PORT
    if not 0 < port < 65_536:
        raise UserError(f"MASTER_PORT={port} must be from 1 to 65535")
    return port


def whole_number(environment: Mapping[str, str], name: str) -> int:
    """Return the whole number in a variable. Raises UserError where there is none, or a larger one than any count."""
    text = environment.get(name, "")
    if not text.isdecimal() or len(text) > _DIGITS:
        raise UserError(f"{name}={text[:_SHOWN]!r} must be a whole number")
    return int(text)
