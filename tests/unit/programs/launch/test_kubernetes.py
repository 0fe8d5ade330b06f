"""The objects that a launcher would create in Kubernetes, and what it refuses to create."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megavlm.command_line.parsing import parse
from megavlm.programs.launch import node
from megavlm.programs.launch.job import Job
from megavlm.programs.launch.kubernetes import complaints, objects
from megavlm.programs.launch.launch import main
from megavlm.resilience.events import STOPPED
from megavlm.world import Node, node_of
from tests.support.cloud import changed, kubernetes_options, needs_cloud_tools, validated_by_kubernetes
from tests.support.forked import ROOT

GOLDEN = Path(__file__).parent / "golden"
JOB = Job(4, 8, ("--config", "/etc/megavlm/run.yaml", "--run-dir", "/data/run"))
PLAIN = kubernetes_options("vlm", "registry/megavlm:1", volumes=["shared:/data"])
FULL = changed(
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


def test_objects_are_what_they_were():
    assert objects(JOB, FULL) == list(yaml.safe_load_all((GOLDEN / "kubernetes-job.yaml").read_text()))


@needs_cloud_tools
@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_the_schemas_of_kubernetes_take_them(version: str):
    """Strictly: a field that the API does not know is an error."""
    made = [*objects(JOB, FULL), *objects(Job(1, 8, ()), PLAIN)]
    wrong = {**made[-1], "spec": {**made[-1]["spec"], "podFailurePolicies": {}}}
    *told, unknown = validated_by_kubernetes([*made, wrong], version)
    assert told == [{}] * len(made)
    assert "podFailurePolicies" in unknown["error"]


def test_pods_find_the_first_by_its_name():
    """A pod of an Indexed Job is JOB-INDEX in the service's domain."""
    environment = _environment(objects(JOB, FULL)[-1])
    assert node_of({**environment, "JOB_COMPLETION_INDEX": "3"}) == Node(3, 4, "vlm-0.vlm", 29500)
    assert node.JOB in environment


def _environment(made: dict[str, Any]) -> dict[str, str]:
    (container,) = _pod(made)["containers"]
    return {each["name"]: each["value"] for each in container["env"]}


def _pod(made: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = made["spec"]["template"]["spec"]
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
    ],
)
def test_a_job_that_cannot_run_is_refused_in_one_line(changes: dict, flags: str, line: str | None):
    told = list(complaints(parse(flags.split()), JOB, changed(PLAIN, **changes)))
    assert all("\n" not in each for each in told)
    assert told == [] if line is None else any(line in each for each in told), told


def test_a_dry_run_prints_all_that_would_be_created(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path):
    """A file of --config travels in a ConfigMap. A job of the same name, later, has other ones."""
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
    name = _pod(job)["subdomain"]
    assert job["metadata"]["name"] == "vlm" != name == service["metadata"]["name"]
    assert _environment(job)["MASTER_ADDR"] == f"vlm-0.{name}"
    mounted = _pod(job)["volumes"][-1]["configMap"]["name"]
    assert mounted == config_map["metadata"]["name"] == f"{name}-config"
    assert _environment(job)["SOME_API_KEY"] == "***"
    assert main([*given.split(), "--", "--config", str(config), "--tp", "16"]) == 2
