"""Describe a run as a CustomJob of Vertex AI and submit it through Google's SDK.

Fields: https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec. Machines:
https://cloud.google.com/vertex-ai/docs/training/configure-compute; docs/clusters.md says which entries were checked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megavlm.config.messages import plain
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.planner.hardware import find_machine
from megavlm.programs.launch.checks import checked, is_in, pairs
from megavlm.programs.launch.job import Job

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class VertexMachine:
    """A machine type of Vertex AI with its fixed accelerator type and count; Vertex AI accepts no other count."""

    name: str
    accelerator: str
    count: int
    profiles: Sequence[str] = ("ethernet",)  # files of launch/profiles that fit the machine's network


_FILE = Path(__file__).with_name("vertex.toml")
MACHINES = {name: VertexMachine(name, **row) for name, row in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--region", required=True, help="Region, such as us-central1.")
    parser.add_argument("--project", help="Project's id; default: that of the credentials.")
    parser.add_argument("--machine", required=True, metavar="TYPE", help="Machine type, such as a3-megagpu-8g.")
    parser.add_argument(
        "--strategy",
        choices=("STANDARD", "SPOT", "FLEX_START"),
        default="STANDARD",
        help="STANDARD: on demand. SPOT: cheaper machines that may be taken. FLEX_START: wait until all are free.",
    )
    parser.add_argument("--timeout", type=seconds, default="7d", metavar="TIME", help="Longest run, as 12h or 3d.")
    parser.add_argument(
        "--max-wait", type=seconds, metavar="TIME", help="FLEX_START: longest wait; 0 for ever; default: 24h."
    )
    parser.add_argument("--base-output-dir", metavar="gs://…", help="Where to write; RUN_DIR is its folder `run`.")
    parser.add_argument("--staging-bucket", metavar="gs://…", help="Where the file of --config is put for replicas.")
    parser.add_argument(
        "--nfs",
        action="append",
        default=[],
        metavar="SERVER:/PATH:NAME",
        help="Share that replicas see in /mnt/nfs/NAME.",
    )
    parser.add_argument("--network", help="Peered network: projects/NUMBER/global/networks/NAME.")
    parser.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help="Label of the job.")


def launch(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Check a job and submit it, or print it; return the exit status."""
    options.labels = pairs("--label", options.label)
    if (folder := run_dir_of(options)) is not None and not any(word.partition("=")[0] == "--run-dir" for word in flags):
        flags = (*flags, "--run-dir", folder)
    known = find_machine(options.machine)
    options.gpu = options.gpu or (None if known is None else known.gpu)
    machine = MACHINES.get(options.machine)
    gpus = machine.count if machine is not None else 8
    job, config_file = checked(options, flags, lambda path: _staged(path, options), complaints, gpus=gpus)
    uploads = {} if config_file is None else {config_file: _url(config_file, options)}
    if options.dry_run:
        described = custom_job(job, options)
        print(json.dumps({"parent": _parent(options), "customJob": described, "uploads": uploads}, indent=2))
        return 0
    return _submit(custom_job(job, options), options, uploads)


def seconds(text: str) -> int:
    """Convert 90, 90s, 15m, 12h or 3d to seconds. Raises argparse.ArgumentTypeError for any other form."""
    if match := re.fullmatch(r"(\d+)([smhd]?)", text):
        return int(match[1]) * _UNITS[match[2] or "s"]
    raise argparse.ArgumentTypeError(f"{text} must be a whole number of seconds, or one with s, m, h or d")


def mounts_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the folders that all replicas share: buckets (mounted by Cloud Storage FUSE) and NFS shares."""
    return ("/gcs/", *(f"/mnt/nfs/{each.rpartition(':')[2]}/" for each in options.nfs))


def _url(path: str, options: argparse.Namespace) -> str:
    """Return where a file is put. Another job of this name, which may have another file, leaves it alone."""
    content = Path(path).read_bytes() if Path(path).is_file() else b""
    digest = hashlib.sha256(content).hexdigest()[:12]
    return f"{options.staging_bucket.rstrip('/')}/{options.name}/{digest}/{Path(path).name}"


def _staged(path: str, options: argparse.Namespace) -> str | None:
    """Return the path at which replicas find a --config file that is staged in the bucket; None for a shared file.

    Raises UserError for a local file if no staging bucket is given.
    """
    if path.startswith(mounts_of(options)):
        return None
    if options.staging_bucket is None:
        raise UserError(f"--config {path} is on this machine: name a --staging-bucket for it, or a path in /gcs/")
    return in_container(_url(path, options))


def _parent(options: argparse.Namespace) -> str:
    return f"projects/{options.project or _default_project()}/locations/{options.region}"


def _default_project() -> str:
    """Return the project of this machine's credentials, "PROJECT" if google.auth is missing or knows no project.

    Raises UserError if google.auth finds no credentials.
    """
    try:
        import google.auth

        return google.auth.default()[1] or "PROJECT"
    except (ImportError, OSError, ValueError):
        return "PROJECT"
    except Exception as error:  # google.auth's own exceptions
        raise UserError(f"--project is not given, and no other is known: {str(error).partition('.')[0]}") from None


def _submit(described: Mapping[str, Any], options: argparse.Namespace, uploads: Mapping[str, str]) -> int:
    try:
        from google.cloud import aiplatform_v1, storage
    except ImportError:
        raise UserError(
            "google-cloud-aiplatform is not installed here: pip install -e '.[vertex]'; --dry-run prints the job"
        ) from None
    for path, url in uploads.items():
        storage.Blob.from_string(url, client=storage.Client(options.project)).upload_from_filename(path)
    endpoint = {"api_endpoint": f"{options.region}-aiplatform.googleapis.com"}
    client = aiplatform_v1.JobServiceClient(client_options=endpoint)
    job = aiplatform_v1.CustomJob.from_json(json.dumps(described))
    print(client.create_custom_job(parent=_parent(options), custom_job=job).name)
    return 0


def run_dir_of(options: argparse.Namespace) -> str | None:
    """Return the path of the run folder in the base output directory; None if no base output directory is given."""
    return None if options.base_output_dir is None else in_container(f"{options.base_output_dir.rstrip('/')}/run")


def in_container(url: str) -> str:
    """Return the path under which replicas see a gs:// URL."""
    return f"/gcs/{url.removeprefix('gs://')}"


def complaints(config: Config, job: Job, options: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each mistake with which Vertex AI would refuse a job after its queue, or run it in vain.

    Vertex AI itself reports wrong names when the job is submitted.
    """
    machine = MACHINES.get(options.machine)
    if machine is None:
        yield f"--machine {plain(options.machine)} is no GPU machine that is known: choose one of {', '.join(MACHINES)}"
        return
    if job.processes != machine.count:
        yield f"--gpus-per-node {job.processes}: {machine.name} has {machine.count} GPUs, and a job has all of them"
    if options.profile is not None and options.profile not in machine.profiles:
        yield f"--profile {options.profile} is for other machines: {machine.name} has {' or '.join(machine.profiles)}"
    for option, text in [*options.variables.items(), *(("--", flag) for flag in job.flags)]:
        if "$(" in text:  # whether it undoes $$( is not documented
            yield f"{plain(option)} {plain(text)}: Vertex AI puts variables where $( stands: use a file of --config"
    yield from _of_storage(config, options)


def _of_storage(config: Config, options: argparse.Namespace) -> Iterator[str]:
    places = {"--base-output-dir": options.base_output_dir, "--staging-bucket": options.staging_bucket}
    for option, value in places.items():
        if value is None:
            continue
        plain_parts = not {".", ".."} & set(value.split("/")) and value.isprintable()
        if not plain_parts or not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/\S*)?", value):
            yield f"{option} {plain(value)} must be gs://BUCKET or a folder in it"
    for each in options.nfs:
        if not re.fullmatch(r"[^:/\s]+:/[^:\s]*:[A-Za-z0-9_-]+", each):
            yield f"--nfs {plain(each)} must be SERVER:/PATH:NAME; replicas see it in /mnt/nfs/NAME"
    if options.nfs and options.network is None:
        yield "--nfs needs --network: replicas reach a server only in a network that is peered with them"
    if not is_in(config.run.run_dir, mounts_of(options)):
        yield (
            f"--run-dir {config.run.run_dir} is on the disk of each replica and lost with it: use --base-output-dir, "
            f"or a folder in {' or '.join(mounts_of(options))}"
        )


def custom_job(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Return the CustomJob as JSON of the REST API. Worker pool 0 has one replica, pool 1 all other replicas."""
    machine = MACHINES[options.machine]
    pools = [_training(job, options, machine, replicas=1)]
    if job.nodes > 1:
        pools.append(_training(job, options, machine, replicas=job.nodes - 1))
    scheduling: dict[str, Any] = {"timeout": f"{options.timeout}s", "strategy": options.strategy}
    if options.max_wait is not None:
        scheduling["maxWaitDuration"] = f"{options.max_wait}s"
    spec: dict[str, Any] = {"workerPoolSpecs": pools, "scheduling": scheduling}
    optional = {
        "serviceAccount": options.service_account,
        "network": options.network,
        "baseOutputDirectory": options.base_output_dir and {"outputUriPrefix": options.base_output_dir},
    }
    spec |= {key: value for key, value in optional.items() if value is not None}
    labels = {"labels": dict(options.labels)} if options.labels else {}
    return {"displayName": options.name, "jobSpec": spec} | labels


def _training(job: Job, options: argparse.Namespace, machine: VertexMachine, *, replicas: int) -> dict[str, Any]:
    own = ("--gpus-per-node", str(job.processes), "--grace", str(options.grace))
    pool: dict[str, Any] = {
        "machineSpec": {
            "machineType": machine.name,
            "acceleratorType": machine.accelerator,
            "acceleratorCount": machine.count,
        },
        "replicaCount": str(replicas),  # JSON of a 64-bit number
        "containerSpec": {
            "imageUri": options.image,
            "command": ["python", "-m", "megavlm.programs.launch.node"],
            "args": [*own, "--max-crashes", str(options.max_crashes), "--", *job.flags],
            "env": [{"name": name, "value": value} for name, value in sorted(options.variables.items())],
        },
    }
    if options.nfs:
        pool["nfsMounts"] = [
            {"server": server, "path": path, "mountPoint": name}
            for server, path, name in (each.split(":") for each in options.nfs)
        ]
    return pool
