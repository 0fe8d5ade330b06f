"""The objects that a launcher would create in Kubernetes, and what it refuses to create."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megavlm.command_line.parsing import parse
from megavlm.programs.launch import node
from megavlm.programs.launch.job import Job
from megavlm.programs.launch.kubernetes import Options, complaints, objects
from megavlm.programs.launch.launch import main
from megavlm.resilience.status import STOPPED
from megavlm.world import Node, node_of
from tests.support.cloud import needs_cloud_tools, validated_by_kubernetes
from tests.support.forked import ROOT

GOLDEN = Path(__file__).parent / "golden"
JOB = Job(4, 8, ("--config", "/etc/megavlm/run.yaml", "--run-dir", "/data/run"))
PLAIN = Options("vlm", "registry/megavlm:1", volumes=("shared:/data",))
FULL = replace(
    PLAIN,
    namespace="training",
    volumes=("shared:/data", "models.v1:/models"),
    resources={"cpu": "96", "memory": "1Ti", "rdma/ib": "8"},
    variables={"NCCL_CROSS_NIC": "0"},
    node_selector={"cloud.google.com/gke-accelerator": "nvidia-h100-mega-80gb"},
    service_account="trainer",
    pull_secret="registry",
    priority_class="high",
    queue="team-a",
    config_file=("run.yaml", "parallel: {tensor_model_parallel_size: 8}\n"),
)


@pytest.mark.parametrize("name", ["job", "jobset"])
def test_objects_are_what_they_were(name: str):
    made = objects(JOB, replace(FULL, jobset=name == "jobset"))
    assert made == list(yaml.safe_load_all((GOLDEN / f"kubernetes-{name}.yaml").read_text()))


@needs_cloud_tools
@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_the_schemas_of_kubernetes_take_them(version: str):
    """Strictly: a field that the API does not know is an error. A JobSet holds a Job's specification."""
    made = [*objects(JOB, FULL), *objects(Job(1, 8, ()), PLAIN)]
    (*_, jobset) = objects(JOB, replace(FULL, jobset=True))
    (replicated,) = jobset["spec"]["replicatedJobs"]
    made.append(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": replicated["template"]["spec"]}
    )
    wrong = {**made[-1], "spec": {**made[-1]["spec"], "podFailurePolicies": {}}}
    *told, unknown = validated_by_kubernetes([*made, wrong], version)
    assert told == [{}] * len(made)
    assert "podFailurePolicies" in unknown["error"]


def test_a_jobset_has_the_fields_of_its_definition():
    """By hand: https://github.com/kubernetes-sigs/jobset/blob/main/api/jobset/v1alpha2/jobset_types.go"""
    (*_, jobset) = objects(JOB, replace(FULL, jobset=True))
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    spec = jobset["spec"]
    assert set(spec) <= {"replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend"}
    assert set(spec["network"]) <= {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"}
    assert set(spec["failurePolicy"]) <= {"maxRestarts", "rules", "restartStrategy"}
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] in ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
    assert set(rule["onJobFailureReasons"]) <= {"BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy"}
    (replicated,) = spec["replicatedJobs"]
    assert set(replicated) <= {"name", "replicas", "template", "groupName", "dependsOn"}


@pytest.mark.parametrize("jobset", [False, True])
def test_pods_find_the_first_by_its_name(jobset: bool):
    """A pod of an Indexed Job is JOB-INDEX in the service's domain; one of a JobSet SET-JOB-0-INDEX in the set's."""
    environment = _environment(objects(JOB, replace(FULL, jobset=jobset))[-1])
    found = node_of({**environment, "JOB_COMPLETION_INDEX": "3"})
    assert found == Node(3, 4, "vlm-node-0-0.vlm" if jobset else "vlm-0.vlm", 29500)
    assert node.JOB in environment


def _environment(made: dict[str, Any]) -> dict[str, str]:
    (container,) = _pod(made)["containers"]
    return {each["name"]: each["value"] for each in container["env"]}


def _pod(made: dict[str, Any]) -> dict[str, Any]:
    spec = made["spec"]
    if made["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    pod: dict[str, Any] = spec["template"]["spec"]
    return pod


@pytest.mark.parametrize(
    ("status", "action"), [(0, None), (1, "FailJob"), (2, "FailJob"), (3, "FailJob"), (STOPPED, "Ignore"), (137, None)]
)
def test_a_mistake_is_not_retried_and_a_pod_that_saved_is_replaced(status: int, action: str | None):
    """None: an end that counts towards backoffLimit, unless it is 0. The first rule that fits is taken."""
    (*_, made) = objects(JOB, PLAIN)
    rules = made["spec"]["podFailurePolicy"]["rules"]
    found = [rule["action"] for rule in rules if status in rule.get("onExitCodes", {}).get("values", [])]
    assert (found or [None])[0] == action
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert _pod(made)["restartPolicy"] == "Never"  # the API wants it with a podFailurePolicy
    (container,) = _pod(made)["containers"]
    assert all(each["onExitCodes"]["containerName"] == container["name"] for each in rules[1:])


@pytest.mark.parametrize(
    ("changes", "flags", "line"),
    [
        ({}, "--run-dir /data/run", None),
        (
            {},
            "--run-dir /database",
            "/database is on the disk of each pod and lost with it: use a folder in /data/",
        ),
        (dict(volumes=()), "--run-dir /data/run", "give --volume CLAIM:/PATH"),
        (dict(volumes=("shared",)), "--run-dir /data/run", "--volume shared must be CLAIM:/PATH"),
        (
            dict(volumes=("a:/data", "b:/dev/shm")),
            "--run-dir /data/run",
            "--volume /dev/shm/ hides what the pod itself",
        ),
        (dict(name="Run_1"), "--run-dir /data/run", "--name Run_1 must have lowercase letters"),
        (dict(name="a" * 62), "--run-dir /data/run", "is too long"),
        (dict(name="a" * 55, jobset=True), "--run-dir /data/run", "is too long"),
        (dict(resources={"nvidia.com/gpu": "8"}), "--run-dir /data/run", "is --gpus-per-node"),
        (dict(variables={"MASTER_ADDR": "a"}), "--run-dir /data/run", "--env MASTER_ADDR is set by the job itself"),
        (dict(name="a\nb"), "--run-dir /data/run", "must have lowercase letters"),
    ],
)
def test_a_job_that_cannot_run_is_refused_in_one_line(changes: dict, flags: str, line: str | None):
    told = list(complaints(parse(flags.split()), JOB, replace(PLAIN, **changes)))
    assert all("\n" not in each for each in told)
    assert told == [] if line is None else any(line in each for each in told), told


def test_one_pod_may_lose_its_disk_where_a_store_has_copies():
    for nodes, place, refused in ((1, "s3://bucket/run", False), (2, "s3://bucket/run", True), (1, "/copies", True)):
        config = parse(["--run-dir", "/run", "--checkpoint-dir", place])
        for volumes in ((), ("shared:/data",)):
            told = list(complaints(config, Job(nodes, 8, ()), replace(PLAIN, volumes=volumes)))
            assert bool(told) is refused, told


def test_a_dry_run_prints_all_that_would_be_created(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path):
    """A file of --config travels in a ConfigMap."""
    monkeypatch.chdir(ROOT)
    config = tmp_path / "run.yaml"
    config.write_text("parallel: {tensor_model_parallel_size: 4}\nrun: {run_dir: /data/run}\n")
    given = "kubernetes --nodes 2 --name vlm --image registry/megavlm:1 --volume shared:/data --dry-run"
    given += " --profile infiniband --env SOME_API_KEY=0123456789"
    assert main([*given.split(), "--", "--config", str(config)]) == 0
    config_map, service, job = yaml.safe_load_all(capsys.readouterr().out)
    assert config_map["data"] == {"run.yaml": config.read_text()}
    assert service["spec"]["clusterIP"] == "None"
    (container,) = _pod(job)["containers"]
    assert container["args"][-3:] == ["--", "--config", "/etc/megavlm/run.yaml"]
    assert _environment(job)["NCCL_CROSS_NIC"] == "0"
    assert _environment(job)["SOME_API_KEY"] == "***"
    assert main([*given.split(), "--", "--config", str(config), "--tp", "16"]) == 2
