"""Which of how many machines this is, by what Vertex AI and Kubernetes put into the environment."""

from __future__ import annotations

import json

import pytest

from megavlm.errors import UserError
from megavlm.world import Node, World, node_of, world_of


def spec(pool: str, index: int, *sizes: int) -> str:
    """CLUSTER_SPEC as Vertex AI writes it, of pools with so many replicas."""
    cluster = {
        f"workerpool{number}": [f"cmle-training-workerpool{number}-1d969d3ba6-{each}:2222" for each in range(size)]
        for number, size in enumerate(sizes)
        if size
    }
    job = json.dumps({"python_module": "", "package_uris": [], "job_args": []})
    task = {"type": pool, "index": index}
    return json.dumps({"cluster": cluster, "environment": "cloud", "task": task, "job": job, "open_ports": [3333]})


PRIMARY = "cmle-training-workerpool0-1d969d3ba6-0"


@pytest.mark.parametrize(
    ("environment", "node"),
    [
        ({}, Node()),
        ({"CLUSTER_SPEC": spec("workerpool0", 0, 1)}, Node()),
        ({"CLUSTER_SPEC": spec("workerpool0", 0, 1, 3)}, Node(0, 4, PRIMARY, 2222)),
        ({"CLUSTER_SPEC": spec("workerpool1", 2, 1, 3)}, Node(3, 4, PRIMARY, 2222)),
        ({"CLUSTER_SPEC": spec("workerpool1", 0, 1, 1, 5)}, Node(1, 2, PRIMARY, 2222)),  # reducers do not train
        ({"CLUSTER_SPEC": spec("workerpool1", 0, 1, 1, 0, 1)}, Node(1, 2, PRIMARY, 2222)),  # nor do evaluators
        (
            # Vertex AI counts replicas in RANK and WORLD_SIZE
            {
                "CLUSTER_SPEC": spec("workerpool1", 0, 1, 1),
                "MASTER_ADDR": "10.0.0.7",
                "MASTER_PORT": "3333",
                "RANK": "1",
            },
            Node(1, 2, "10.0.0.7", 3333),
        ),
        ({"MEGAVLM_NODES": "1", "JOB_COMPLETION_INDEX": "0"}, Node()),
        (
            {"MEGAVLM_NODES": "4", "JOB_COMPLETION_INDEX": "3", "MASTER_ADDR": "run-0.run", "MASTER_PORT": "29400"},
            Node(3, 4, "run-0.run", 29400),
        ),
    ],
)
def test_a_machine_finds_its_place(environment: dict[str, str], node: Node):
    assert node_of(environment) == node


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"CLUSTER_SPEC": "{"}, "has no cluster and task"),
        ({"CLUSTER_SPEC": "[" * 10**5}, "has no cluster and task"),
        ({"CLUSTER_SPEC": '{"cluster": {}, "task": {"type": "a", "index": Infinity}}'}, "has no cluster and task"),
        ({"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"]}}'}, "has no cluster and task"),
        ({"CLUSTER_SPEC": spec("workerpool1", 3, 1, 3)}, "no replica 3 in workerpool1"),
        (
            {"CLUSTER_SPEC": spec("workerpool2", 0, 1, 1, 2)},
            "is in workerpool2; only those of",
        ),
        ({"CLUSTER_SPEC": spec("workerpool1", 0, 1, 1), "MASTER_PORT": "0"}, "MASTER_PORT=0 must be from 1 to 65535"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX is set and MEGAVLM_NODES is not"),
        ({"MEGAVLM_NODES": "2", "JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": "a"}, "must be below MEGAVLM_NODES=2"),
        ({"MEGAVLM_NODES": "2", "JOB_COMPLETION_INDEX": "1"}, "MASTER_ADDR is not set"),
        ({"MEGAVLM_NODES": "two", "JOB_COMPLETION_INDEX": "1"}, "MEGAVLM_NODES='two' must be a whole number"),
    ],
)
def test_what_is_missing_or_contradictory_is_one_line(environment: dict[str, str], line: str):
    with pytest.raises(UserError, match=line) as told:
        node_of(environment)
    assert "\n" not in str(told.value)


def test_a_process_that_is_one_of_many_machines_does_not_train_alone():
    """Without torchrun it would, beside all others and in the same folder. Independent tasks of an array may."""
    for environment in (
        {"CLUSTER_SPEC": spec("workerpool1", 0, 1, 1)},
        {"MEGAVLM_NODES": "2", "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "a"},
    ):
        with pytest.raises(
            UserError, match=r"one of 2 machines of a job: start each by python -m megavlm\.programs\.launch\.node"
        ):
            world_of(environment)
    assert world_of({"CLUSTER_SPEC": spec("workerpool0", 0, 1)}) == world_of({"JOB_COMPLETION_INDEX": "3"}) == World()
