"""Describe a run as objects of Kubernetes: an Indexed Job with a headless service, or a JobSet. Pure.

Fields: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/ and
https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from megavlm.config.messages import plain
from megavlm.config.schema import Config
from megavlm.programs.launch.checks import is_in, outlives_machines
from megavlm.programs.launch.job import Job
from megavlm.programs.launch.node import JOB
from megavlm.world import NODES

PORT = 29500
CONFIG = "/etc/megavlm"  # folder of the file of --config
_PARTS = "node"  # name of the JobSet's one job
_NAME = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
_OWN_PLACES = ("/", "/dev/shm/", f"{CONFIG}/")
_LONGEST = 63  # characters of a name in DNS
# Time after the last save within which a pod hears what the others did, and ends.
_AGREEMENT = 60


@dataclass(frozen=True)
class Options:
    """What `megavlm launch kubernetes` is asked for beside the job."""

    name: str
    image: str
    namespace: str | None = None
    jobset: bool = False
    volumes: tuple[str, ...] = ()  # CLAIM:/PATH
    resources: Mapping[str, str] = field(default_factory=dict)  # of the container, beside GPUs
    variables: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    shm: str = "64Gi"
    service_account: str | None = None
    pull_secret: str | None = None
    priority_class: str | None = None
    queue: str | None = None
    grace: int = 240
    max_crashes: int = 10
    max_lost_pods: int = 100
    config_file: tuple[str, str] | None = None  # name and content
    identity: str = ""  # names the job in RUN_DIR/jobs; a later job of the same name has another

    @property
    def mounts(self) -> tuple[str, ...]:
        return tuple(f"{each.partition(':')[2].rstrip('/')}/" for each in self.volumes)

    @property
    def first_pod(self) -> str:
        """Return the name by which all pods find the first."""
        return f"{self.name}-{_PARTS}-0-0.{self.name}" if self.jobset else f"{self.name}-0.{self.name}"


def complaints(config: Config, job: Job, options: Options) -> Iterator[str]:
    """Yield a line for each reason for which a cluster would refuse a job, or run it to no avail."""
    longest = f"{options.name}-{_PARTS}-0-" if options.jobset else f"{options.name}-"
    longest += str(max(job.nodes - 1, 0))
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", options.name):
        yield f"--name {plain(options.name)} must have lowercase letters, digits and - only, and begin with a letter"
    elif len(longest) > _LONGEST:
        yield f"--name {options.name} is too long: pods are named {longest}, with {_LONGEST} characters at most"
    if not re.fullmatch(r"\S+", options.image):
        yield f"--image {options.image!r} must be the name of an image"
    for option, given in (("--namespace", options.namespace), ("--queue", options.queue)):
        if given is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", given):
            yield f"{option} {plain(given)} must have lowercase letters, digits and - only"
    for option, given in (
        ("--service-account", options.service_account),
        ("--pull-secret", options.pull_secret),
        ("--priority-class", options.priority_class),
    ):
        if given is not None and not re.fullmatch(_NAME, given):
            yield f"{option} {plain(given)} must have lowercase letters, digits, - and . only"
    for option, labels in (("--resource", options.resources), ("--node-selector", options.node_selector)):
        for name in labels:
            if not re.fullmatch(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
                yield f"{option} {plain(name)} must have letters, digits, -, _ and . only, and at most one /"
    yield from _of_volumes(config, job, options)
    for name, quantity in [*options.resources.items(), ("--shm", options.shm)]:
        if not re.fullmatch(r"\d+(\.\d+)?(m|k|[KMGTPE]i?)?", quantity):
            yield f"{plain(name)} {plain(quantity)} must be a quantity such as 8, 500m or 64Gi"
    if gpus := next((name for name in options.resources if name.startswith("nvidia.com/gpu")), None):
        yield f"--resource {gpus} is --gpus-per-node: leave it out"
    if reserved := next((name for name in options.variables if name in _own_names()), None):
        yield f"--env {reserved} is set by the job itself: leave it out"
    if options.grace < 1:
        yield f"--grace {options.grace} must be at least 1"
    if options.max_lost_pods < 0:
        yield f"--max-lost-pods {options.max_lost_pods} must not be negative"


def _of_volumes(config: Config, job: Job, options: Options) -> Iterator[str]:
    for each in options.volumes:
        claim, _, path = each.partition(":")
        inside = PurePosixPath(path)
        if not re.fullmatch(_NAME, claim) or not inside.is_absolute() or ".." in inside.parts or not path.isprintable():
            yield f"--volume {plain(each)} must be CLAIM:/PATH, with the name of a PersistentVolumeClaim"
    if len(set(options.mounts)) < len(options.mounts):
        yield "--volume names one path for two claims"
    if hidden := next((each for each in options.mounts if each in _OWN_PLACES), None):
        yield f"--volume {hidden} hides what the pod itself has there: mount the claim elsewhere"
    if not is_in(config.run.run_dir, options.mounts) and not outlives_machines(config, job):
        places = f"use a folder in {' or '.join(options.mounts)}" if options.mounts else "give --volume CLAIM:/PATH"
        place = f"{places}, or with one pod --checkpoint-dir URL"
        yield f"--run-dir {config.run.run_dir} is on the disk of each pod and lost with it: {place}"


def objects(job: Job, options: Options) -> list[dict[str, Any]]:
    """Return the objects to create, in this order."""
    found: list[dict[str, Any]] = []
    if options.config_file is not None:
        name, content = options.config_file
        found.append(_object("v1", "ConfigMap", options, {"data": {name: content}}, name=f"{options.name}-config"))
    if options.jobset:
        # The operator makes the service.
        return [*found, _object("jobset.x-k8s.io/v1alpha2", "JobSet", options, {"spec": _jobset(job, options)})]
    return [
        *found,
        _object("v1", "Service", options, {"spec": _service(options)}),
        _object("batch/v1", "Job", options, {"spec": {**_job(job, options), **_held(options)}}),
    ]


def _object(
    version: str, kind: str, options: Options, rest: Mapping[str, Any], *, name: str | None = None
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name or options.name}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    labels = {"app.kubernetes.io/name": "megavlm", "app.kubernetes.io/instance": options.name}
    if options.queue is not None and kind in ("Job", "JobSet"):
        labels["kueue.x-k8s.io/queue-name"] = options.queue
    return {"apiVersion": version, "kind": kind, "metadata": {**metadata, "labels": labels}, **rest}


def _held(options: Options) -> dict[str, Any]:
    return {"suspend": True} if options.queue is not None else {}  # Kueue lets it go


def _service(options: Options) -> dict[str, Any]:
    return {
        "clusterIP": "None",
        "selector": {"batch.kubernetes.io/job-name": options.name},
        "publishNotReadyAddresses": True,
        "ports": [{"name": "meeting", "port": PORT}],
    }


def _job(job: Job, options: Options) -> dict[str, Any]:
    """Return the specification of an Indexed Job.

    The machines themselves start the run again after a crash (`megavlm.programs.launch.node`). What is left to the
    cluster is to replace pods that it took or lost, and to end the job when the machines have decided to.
    """
    return {
        "completions": job.nodes,
        "parallelism": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": options.max_lost_pods,
        "podReplacementPolicy": "Failed",  # never two pods of one number
        # Machine 0 ends with 0 when all have finished. One that was lost just then must not wait for it for ever.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "podFailurePolicy": {
            "rules": [
                # A pod that was preempted, drained or evicted comes back, and that counts for nothing …
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                # … nor does one that was deleted, saved and ended with 75.
                {"action": "Ignore", "onExitCodes": {"containerName": "megavlm", "operator": "In", "values": [75]}},
                # Too many crashes (1), a user's mistake (2), bad numbers (3): another pod would do no better.
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "megavlm", "operator": "In", "values": [1, 2, 3]},
                },
                # Any other end, as by SIGKILL (137), counts towards backoffLimit.
            ]
        },
        "template": {"metadata": {"labels": {"app.kubernetes.io/instance": options.name}}, "spec": _pod(job, options)},
    }


def _jobset(job: Job, options: Options) -> dict[str, Any]:
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        # What the machines have decided fails the whole; all else, as too many lost pods, starts all pods anew.
        "failurePolicy": {
            "maxRestarts": options.max_crashes,
            "rules": [{"name": "decided", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "replicatedJobs": [{"name": _PARTS, "replicas": 1, "template": {"spec": _job(job, options)}}],
        **_held(options),
    }


def _pod(job: Job, options: Options) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # torch's data workers and NCCL use it
    for number, each in enumerate(options.volumes):
        claim, _, path = each.partition(":")
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    if options.config_file is not None:
        volumes.append({"name": "config", "configMap": {"name": f"{options.name}-config"}})
        mounts.append({"name": "config", "mountPath": CONFIG})
    resources = {"nvidia.com/gpu": str(job.processes), **options.resources}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace + _AGREEMENT,
        "containers": [
            {
                "name": "megavlm",
                "image": options.image,
                "command": ["python", "-m", "megavlm.programs.launch.node"],
                "args": [
                    *("--gpus-per-node", str(job.processes), "--grace", str(options.grace)),
                    *("--max-crashes", str(options.max_crashes), "--", *map(_escaped, job.flags)),
                ],
                "env": _environment(job, options),
                "resources": {"limits": resources, "requests": dict(resources)},
                "volumeMounts": mounts,
                **_adapters(options),
            }
        ],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "volumes": volumes,
    }
    if not options.jobset:
        pod["subdomain"] = options.name  # the service, which gives pods names
    optional = {
        "nodeSelector": dict(options.node_selector) or None,
        "serviceAccountName": options.service_account,
        "priorityClassName": options.priority_class,
        "imagePullSecrets": [{"name": options.pull_secret}] if options.pull_secret else None,
    }
    return pod | {key: value for key, value in optional.items() if value is not None}


def _adapters(options: Options) -> dict[str, Any]:
    """Return what a container needs to pin memory, if it has network adapters (rdma/ib, vpc.amazonaws.com/efa, …)."""
    pins = any("/" in name for name in options.resources)
    return {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if pins else {}


def _environment(job: Job, options: Options) -> list[dict[str, str]]:
    own = {
        JOB: options.identity or options.name,
        NODES: str(job.nodes),
        "MASTER_ADDR": options.first_pod,
        "MASTER_PORT": str(PORT),
    }
    return [{"name": key, "value": _escaped(value)} for key, value in {**options.variables, **own}.items()]


def _escaped(text: str) -> str:
    """Return a text of which Kubernetes makes the given one: it reads $$ as $, and $(NAME) as a variable."""
    return text.replace("$", "$$")


def _own_names() -> tuple[str, ...]:
    return (JOB, NODES, "MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX")
