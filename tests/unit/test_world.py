"""Which of how many processes and machines this is, as launchers and platforms say it."""

from __future__ import annotations

import json

import pytest

from megavlm.errors import UserError
from megavlm.world import Node, World, node_of, world_of

TORCHRUN = {
    **{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "gpu1", "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "none"},
}
SET_BY_HAND = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    **{"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "16"},
    **{"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "gpu[007-008]"},
    **{"SLURM_JOB_NODELIST": "gpu[001-008]", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2"},
    **{"SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9"},
}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "gpu[007-008]"}
SRUN_PORT = 15_000 + 77 + 2 * 1009


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, World()),
        ({"MASTER_ADDR": "gpu1", "WORLD_SIZE": "1"}, World()),
        (TORCHRUN, World(5, 8, 1, 4, "gpu1", 29511)),
        (SET_BY_HAND, World(3, 4, 1, None, "10.0.0.1", 29500)),
        (OPEN_MPI, World(2, 4, 2, 4, "127.0.0.1", 29500)),
        (OPEN_MPI | {"MASTER_ADDR": "gpu1", "MASTER_PORT": "1234"}, World(2, 4, 2, 4, "gpu1", 1234)),
        (MPICH, World(1, 2, 1, 2, "127.0.0.1", 29500)),
        (SRUN, World(9, 16, 1, 8, "gpu007", SRUN_PORT)),
        (SRUN | {"WORLD_SIZE": "16", "MASTER_ADDR": "gpu9"}, World(9, 16, 1, 8, "gpu9", SRUN_PORT)),
        (SRUN | {"SLURM_STEP_NODELIST": "r[1,3]n[04-05]-ib"}, World(9, 16, 1, 8, "r1n04-ib", SRUN_PORT)),
        (without(SRUN, "SLURM_STEP_NODELIST"), World(9, 16, 1, 8, "gpu001", SRUN_PORT)),
        (without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), World(9, 16, 1, 8, "10.9.9.9", SRUN_PORT)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "16", "SLURM_NODEID": "0"}, World(9, 16, 1, 16, "127.0.0.1", SRUN_PORT)),
        (SRUN | {"PMI_RANK": "9", "PMI_SIZE": "16"}, World(9, 16, 1, 8, "gpu007", SRUN_PORT)),  # srun --mpi=pmi2
        (BATCH_SCRIPT, World()),  # it is no task of a step
        # A launcher within another: one process of torchrun or of MPI's daemons per node is a task of srun.
        (SRUN | {"SLURM_STEP_NUM_TASKS": "2"} | TORCHRUN, World(5, 8, 1, 4, "gpu1", 29511)),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "2"} | OPEN_MPI, World(2, 4, 2, 4, "127.0.0.1", 29500)),
        (SRUN | TORCHRUN, World(5, 8, 1, 4, "gpu1", 29511)),  # an elastic job that lost nodes
    ],
)
def test_every_launcher_describes_one_world(environment: dict[str, str], world: World):
    assert world_of(environment) == world


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"RANK": "0"}, "has RANK and no WORLD_SIZE, LOCAL_RANK"),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "a"}, "has WORLD_SIZE and no RANK, LOCAL_RANK"),
        (without(SET_BY_HAND, "LOCAL_RANK"), "has RANK, WORLD_SIZE and no LOCAL_RANK"),
        (without(SET_BY_HAND, "MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), "no OMPI_COMM_WORLD_LOCAL_RANK"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "8"}, "MASTER_ADDR is not set"),
        (SET_BY_HAND | {"RANK": "4"}, "RANK=4 must be below WORLD_SIZE=4"),
        (SET_BY_HAND | {"MASTER_PORT": "http"}, "MASTER_PORT='http' must be a whole number"),
        (SET_BY_HAND | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 must be from 1 to 65535"),
    ],
)
def test_an_environment_that_lacks_something_is_one_line(environment: dict[str, str], line: str):
    with pytest.raises(UserError, match=line) as raised:
        world_of(environment)
    assert "\n" not in str(raised.value)


def test_what_a_launcher_said_reads_as_if_torchrun_had_said_it():
    for environment in (SET_BY_HAND, OPEN_MPI, MPICH, SRUN, TORCHRUN):
        world = world_of(environment)
        assert world_of(world.environment()) == world


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


INDEXED = {"MEGAVLM_NODES": "4", "JOB_COMPLETION_INDEX": "3"}
BOTH = {"CLUSTER_SPEC": spec("workerpool1", 0, 1, 1)}
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
        # Vertex AI counts replicas in RANK and WORLD_SIZE
        ({**BOTH, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "3333", "RANK": "1"}, Node(1, 2, "10.0.0.7", 3333)),
        ({"MEGAVLM_NODES": "1", "JOB_COMPLETION_INDEX": "0"}, Node()),
        ({**INDEXED, "MASTER_ADDR": "run-0.run", "MASTER_PORT": "29400"}, Node(3, 4, "run-0.run", 29400)),
    ],
)
def test_a_machine_finds_its_place(environment: dict[str, str], node: Node):
    assert node_of(environment) == node


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"CLUSTER_SPEC": "{"}, "has no cluster and task"),
        ({"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"]}}'}, "has no cluster and task"),
        ({"CLUSTER_SPEC": spec("workerpool1", 3, 1, 3)}, "no replica 3 in workerpool1"),
        ({"CLUSTER_SPEC": spec("workerpool2", 0, 1, 1, 2)}, "is in workerpool2; only those of"),
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
