"""Describe a run as an Indexed Job of Kubernetes, after the template `kubernetes.yaml`, and submit it by kubectl."""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from megavlm.config.messages import plain
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.programs.launch.checks import checked, is_in, pairs
from megavlm.programs.launch.job import Job
from megavlm.programs.launch.node import JOB
from megavlm.world import NODES

PORT = 29500
CONFIG = "/etc/megavlm"  # folder of the file of --config
_TEMPLATE = Path(__file__).with_name("kubernetes.yaml")
_AGREEMENT = 60  # seconds after the last save within which the pods agree on how the attempt ended, and exit


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--namespace", help="Namespace; default: that of kubectl.")
    parser.add_argument(
        "--volume",
        action="append",
        dest="volumes",
        default=[],
        metavar="CLAIM:/PATH",
        help="Shared storage that all pods mount.",
    )
    parser.add_argument(
        "--resource", action="append", default=[], metavar="NAME=N", help="Needed beside GPUs: rdma/ib=8, cpu=96."
    )
    parser.add_argument(
        "--node-selector", action="append", default=[], metavar="LABEL=VALUE", help="Label of the machines to run on."
    )
    parser.add_argument("--shm", default="64Gi", metavar="SIZE", help="Shared memory of a pod.")
    parser.add_argument("--pull-secret", metavar="NAME", help="Secret with which the image is pulled.")
    parser.add_argument("--priority-class", metavar="NAME", help="Priority class of the pods.")
    parser.add_argument("--queue", metavar="NAME", help="Local queue of Kueue, which starts the job.")
    parser.add_argument("--max-lost-pods", type=int, default=100, metavar="N", help="Killed pods that are replaced.")


def launch(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Check a job and submit it, or print it; return the exit status."""
    completed(options)
    job, file = checked(
        options, flags, lambda path: f"{CONFIG}/{Path(path).name}" if Path(path).is_file() else None, complaints
    )
    if file is not None:
        options.config_file = (Path(file).name, Path(file).read_text(encoding="utf-8"))
    manifest = yaml.safe_dump_all(objects(job, options), sort_keys=False, width=120)
    if options.dry_run:
        print(manifest, end="")
        return 0
    try:
        return subprocess.run(["kubectl", "create", "-f", "-"], input=manifest, text=True, check=False).returncode
    except FileNotFoundError:
        raise UserError("kubectl is not installed here: --dry-run prints what it is to create") from None


def completed(options: argparse.Namespace) -> argparse.Namespace:
    """Parse the options NAME=VALUE and set the job's identity, which differs for a later job of the same name."""
    options.resources = pairs("--resource", options.resource)
    options.node_selector = pairs("--node-selector", options.node_selector)
    options.config_file, options.identity = None, f"{options.name}-{int(time.time()):x}"
    return options


def mounts_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the mount paths of the volumes that all pods share, each with a slash at the end."""
    return tuple(f"{each.partition(':')[2].rstrip('/')}/" for each in options.volumes)


def complaints(config: Config, job: Job, options: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each mistake with which a job would start in vain. kubectl itself reports other mistakes."""
    for each in options.volumes:
        claim, _, path = each.partition(":")
        if not claim or not path.startswith("/") or not path.isprintable():
            yield f"--volume {plain(each)} must be CLAIM:/PATH, with the name of a PersistentVolumeClaim"
    mounts = mounts_of(options)
    if not is_in(config.run.run_dir, mounts):
        place = f"use a folder in {' or '.join(mounts)}" if mounts else "give --volume CLAIM:/PATH"
        yield f"--run-dir {config.run.run_dir} is on the disk of each pod and lost with it: {place}"


def objects(job: Job, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the Kubernetes objects of a job, in the order in which they are to be created."""
    service, made = yaml.safe_load_all(_TEMPLATE.read_text(encoding="utf-8"))
    service["spec"]["selector"] = {"batch.kubernetes.io/job-name": options.name}
    made["spec"] |= {"completions": job.nodes, "parallelism": job.nodes, "backoffLimit": options.max_lost_pods}
    made["spec"]["template"]["metadata"]["labels"] = {"app.kubernetes.io/instance": options.name}
    _fill_pod(made["spec"]["template"]["spec"], job, options)
    found = [service, made]
    if options.queue is not None:
        made["spec"]["suspend"] = True  # Kueue resumes it
    if options.config_file is not None:
        name, content = options.config_file
        found.insert(0, {"apiVersion": "v1", "kind": "ConfigMap", "data": {name: content}})
    for each in found:
        labels = {"app.kubernetes.io/name": "megavlm", "app.kubernetes.io/instance": options.name}
        if options.queue is not None and each is made:
            labels["kueue.x-k8s.io/queue-name"] = options.queue
        # What an earlier job of this name left must not be taken for this job's.
        names = {"ConfigMap": f"{options.identity}-config", "Service": options.identity}
        namespace = {} if options.namespace is None else {"namespace": options.namespace}
        each["metadata"] = {"name": names.get(each["kind"], options.name), **namespace, "labels": labels}
    return found


def _fill_pod(pod: dict[str, Any], job: Job, options: argparse.Namespace) -> None:
    (container,) = pod["containers"]
    volumes, mounts = pod["volumes"], container["volumeMounts"]
    volumes[0]["emptyDir"]["sizeLimit"] = options.shm
    for number, each in enumerate(options.volumes):
        claim, _, path = each.partition(":")
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    if options.config_file is not None:
        volumes.append({"name": "config", "configMap": {"name": f"{options.identity}-config"}})
        mounts.append({"name": "config", "mountPath": CONFIG})
    resources = {**options.resources, "nvidia.com/gpu": str(job.processes)}
    own = {
        JOB: options.identity,
        NODES: str(job.nodes),
        "MASTER_ADDR": f"{options.name}-0.{options.identity}",  # the first pod
        "MASTER_PORT": str(PORT),
    }
    container |= {
        "image": options.image,
        "args": [
            *("--gpus-per-node", str(job.processes), "--grace", str(options.grace)),
            *("--max-crashes", str(options.max_crashes), "--", *map(_escaped, job.flags)),
        ],
        "env": [{"name": key, "value": _escaped(value)} for key, value in {**options.variables, **own}.items()],
        "resources": {"limits": resources, "requests": dict(resources)},
    }
    if any("/" in name for name in options.resources):  # rdma/ib, vpc.amazonaws.com/efa, …: they pin memory
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    pod["terminationGracePeriodSeconds"] = options.grace + _AGREEMENT
    optional = {
        "subdomain": options.identity,  # the service, which gives pods names
        "nodeSelector": dict(options.node_selector) or None,
        "serviceAccountName": options.service_account,
        "priorityClassName": options.priority_class,
        "imagePullSecrets": [{"name": options.pull_secret}] if options.pull_secret else None,
    }
    pod |= {key: value for key, value in optional.items() if value is not None}


def _escaped(text: str) -> str:
    """Escape a text for Kubernetes, which reads $$ as $ and replaces $(NAME) by a variable."""
    return text.replace("$", "$$")
