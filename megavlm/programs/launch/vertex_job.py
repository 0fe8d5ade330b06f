"""Describe a run as a CustomJob of Vertex AI, and say what it would refuse after its queue. Pure.

Fields: https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from megavlm.config.messages import plain
from megavlm.config.schema import Config
from megavlm.programs.launch.checks import is_in, outlives_machines
from megavlm.programs.launch.job import Job
from megavlm.programs.launch.vertex_machines import (
    BANDWIDTH,
    FLEX_START_SERIES,
    MACHINES,
    REDUCER,
    REDUCER_BANDWIDTH,
    REDUCER_IMAGE,
    Machine,
)

DAY = 86_400  # seconds


@dataclass(frozen=True)
class Options:
    """What `megavlm launch vertex` is asked for beside the job. Times are seconds."""

    name: str
    region: str
    image: str
    machine: str
    project: str | None = None
    accelerator: str | None = None
    strategy: str = "STANDARD"
    timeout: int = 7 * DAY
    max_wait: int | None = None
    restart_job_on_worker_restart: bool = False
    disable_retries: bool = False
    base_output_dir: str | None = None
    staging_bucket: str | None = None
    nfs: tuple[str, ...] = ()
    network: str | None = None
    service_account: str | None = None
    tensorboard: str | None = None
    boot_disk_gb: int | None = None
    reduction_server: bool = False
    reducers: int | None = None
    evaluator: Mapping[str, Any] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)  # of the container
    profile: str | None = None
    grace: int = 240
    max_crashes: int = 10

    @property
    def mounts(self) -> tuple[str, ...]:
        """Return the folders that all replicas share: buckets, by Cloud Storage FUSE, and NFS."""
        return ("/gcs/", *(f"/mnt/nfs/{each.rpartition(':')[2]}/" for each in self.nfs))


def run_dir_of(options: Options) -> str | None:
    """Return the path of the run folder, which lies in the base output directory."""
    return None if options.base_output_dir is None else in_container(f"{options.base_output_dir.rstrip('/')}/run")


def in_container(url: str) -> str:
    """Return the path under which replicas see a gs:// URL."""
    return f"/gcs/{url.removeprefix('gs://')}"


def complaints(config: Config, job: Job, options: Options) -> Iterator[str]:
    """Yield a line for each reason for which Vertex AI would refuse a job, or run it to no avail."""
    machine = MACHINES.get(options.machine)
    if machine is None:
        yield _unknown_machine(options.machine)
        return
    yield from _of_machine(job, options, machine)
    yield from _of_names(job, options)
    yield from _of_scheduling(options, machine)
    yield from _of_storage(config, job, options)
    if options.reduction_server or options.reducers is not None:
        yield from _of_reduction_server(config, job, options, machine)


def _unknown_machine(name: str) -> str:
    if name.startswith("n1-"):
        return f"--machine {name}: the GPUs of N1 machines (V100, P100, T4, P4) have no bfloat16: use G2, A2 or later"
    return f"--machine {name} is no GPU machine that is known: choose one of {', '.join(MACHINES)}"


def _of_machine(job: Job, options: Options, machine: Machine) -> Iterator[str]:
    if options.accelerator not in (None, machine.accelerator):
        yield f"--accelerator {options.accelerator}: {machine.name} has {machine.accelerator}"
    if job.processes != machine.count:
        yield (f"--gpus-per-node {job.processes}: {machine.name} has {machine.count} GPUs, and a job has all of them")
    if options.profile is not None and options.profile not in machine.profiles:
        yield f"--profile {options.profile} is for other machines: {machine.name} has {' or '.join(machine.profiles)}"
    if options.boot_disk_gb is not None and not 100 <= options.boot_disk_gb <= 64_000:
        yield f"--boot-disk-gb {options.boot_disk_gb} must be from 100 to 64000"


def _of_names(job: Job, options: Options) -> Iterator[str]:
    for option, value, pattern, form in (
        ("--name", options.name, r".{1,128}", "1 to 128 characters in one line"),
        ("--region", options.region, r"[a-z]+-[a-z]+\d+", "a region such as us-central1, not a zone"),
        ("--image", options.image, r"[a-z0-9.-]+\.[a-z]+(:\d+)?/\S+/\S+", "HOST/PROJECT/…/NAME:TAG in a registry"),
        ("--project", options.project, r"[a-z][a-z0-9-]{4,28}[a-z0-9]|\d+", "a project's id or number"),
        (
            "--network",
            options.network,
            r"projects/\d+/global/networks/[a-z0-9-]+",
            "projects/NUMBER/global/networks/NAME",
        ),
        ("--service-account", options.service_account, r"[^@\s]+@[^@\s]+\.[a-z]+", "an e-mail address"),
        (
            "--tensorboard",
            options.tensorboard,
            r"projects/[^/]+/locations/[^/]+/tensorboards/\d+",
            "projects/PROJECT/locations/REGION/tensorboards/NUMBER",
        ),
    ):
        if value is not None and not re.fullmatch(pattern, value):
            yield f"{option} {value!r} must be {form}"
    for key, value in options.labels.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key) or not re.fullmatch(r"[a-z0-9_-]{0,63}", value):
            given = plain(f"{key}={value}")
            yield f"--label {given} must have lowercase letters, digits, _ and - only, at most 63 of each"
    if options.tensorboard is not None and options.service_account is None:
        yield "--tensorboard needs --service-account: Vertex AI's own account may not write to it"
    for option, text in [*options.variables.items(), *(("--", flag) for flag in job.flags)]:
        if "$(" in text:  # whether it undoes $$( is not documented
            yield f"{plain(option)} {plain(text)}: Vertex AI puts variables where $( stands: use a file of --config"
    if reserved := next((key for key in options.variables if key == "CLUSTER_SPEC" or key.startswith("AIP_")), None):
        yield f"--env {reserved} is set by Vertex AI itself: leave it out"
    if len(options.variables) > 100:
        yield f"--env and --profile set {len(options.variables)} variables; Vertex AI takes 100 at most"


def _of_scheduling(options: Options, machine: Machine) -> Iterator[str]:
    queued = options.strategy == "FLEX_START"
    if options.timeout < 1:
        yield f"--timeout {options.timeout} s must be positive"
    if queued and options.timeout > 7 * DAY:
        yield f"--timeout {options.timeout} s: a job with --strategy FLEX_START runs 7 days ({7 * DAY} s) at most"
    if options.max_wait is not None and not queued:
        yield "--max-wait is for --strategy FLEX_START: other strategies do not wait for machines"
    if options.max_wait is not None and options.max_wait < 0:
        yield f"--max-wait {options.max_wait} s must not be negative; 0 waits for ever"
    if queued and machine.series not in FLEX_START_SERIES:
        yield f"--strategy FLEX_START has L4, A100, H100, H200 and B200, not {machine.accelerator}: use SPOT"
    if queued and (options.reduction_server or options.reducers is not None or options.evaluator is not None):
        yield "--strategy FLEX_START wants the same machine in all pools: leave out --reduction-server and --evaluator"
    if machine.only_queued and options.strategy == "STANDARD":
        yield f"{machine.name} is not to be had on demand: use --strategy SPOT or FLEX_START, or a3-highgpu-8g"
    if options.disable_retries and options.restart_job_on_worker_restart:
        yield "--disable-retries turns --restart-job-on-worker-restart off: keep one of them"
    if options.disable_retries and options.strategy == "SPOT":
        yield "--disable-retries would end a job of --strategy SPOT with its first machine that is taken: leave it out"


def _of_storage(config: Config, job: Job, options: Options) -> Iterator[str]:
    for option, value in (
        ("--base-output-dir", options.base_output_dir),
        ("--staging-bucket", options.staging_bucket),
    ):
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
    if not is_in(config.run.run_dir, options.mounts) and not outlives_machines(config, job):
        yield (
            f"--run-dir {config.run.run_dir} is on the disk of each replica and lost with it: use --base-output-dir, "
            f"a folder in {' or '.join(options.mounts)}, or with one machine --checkpoint-dir URL"
        )


def _of_reduction_server(config: Config, job: Job, options: Options, machine: Machine) -> Iterator[str]:
    """Reduction Server adds up, on machines of its own, what all-reduce sends; no other collective goes through it.

    https://cloud.google.com/blog/topics/developers-practitioners/optimize-training-performance-reduction-server-vertex-ai
    """
    parallel = config.parallel
    if not options.reduction_server:
        yield "--reducers is for --reduction-server: give both"
    if job.nodes < 2:
        yield "--reduction-server speeds up sums over machines, and there is one: leave it out"
    if machine.series != "a2":
        yield (
            f"--reduction-server is for A2 machines: {machine.name} has "
            f"{'a plugin for NCCL of its own' if machine.series in ('a3', 'a4') else 'a network that it does not help'}"
        )
    if parallel.data_parallel_sharding != "none":
        yield (
            "--reduction-server speeds up all-reduce only, and --data-parallel-sharding "
            f"{parallel.data_parallel_sharding} uses reduce-scatter and all-gather: use none, or leave it out"
        )
    for flag, degree in (
        ("--pp", parallel.pipeline_model_parallel_size),
        ("--cp", parallel.context_parallel_size),
        ("--ep", parallel.expert_model_parallel_size),
    ):
        if degree > 1:
            yield f"--reduction-server speeds up plain data parallelism only, and {flag} is {degree}: leave one out"
    if options.reducers is not None and options.reducers < 1:
        yield f"--reducers {options.reducers} must be at least 1"


def reducers_for(nodes: int, machine: Machine) -> int:
    """Return how many reducers have together the bandwidth of all machines that train."""
    return ceil(nodes * BANDWIDTH[machine.count] / REDUCER_BANDWIDTH)


def custom_job(job: Job, options: Options) -> dict[str, Any]:
    """Return the CustomJob, as JSON of the REST API. Pool 0 has one replica, pool 1 the others that train."""
    spec: dict[str, Any] = {"workerPoolSpecs": _pools(job, options), "scheduling": _scheduling(options)}
    optional = {
        "serviceAccount": options.service_account,
        "network": options.network,
        "tensorboard": options.tensorboard,
        "baseOutputDirectory": options.base_output_dir and {"outputUriPrefix": options.base_output_dir},
    }
    spec |= {key: value for key, value in optional.items() if value is not None}
    labels = {"labels": dict(options.labels)} if options.labels else {}
    return {"displayName": options.name, "jobSpec": spec} | labels


def _scheduling(options: Options) -> dict[str, Any]:
    scheduling: dict[str, Any] = {"timeout": f"{options.timeout}s", "strategy": options.strategy}
    if options.max_wait is not None:
        scheduling["maxWaitDuration"] = f"{options.max_wait}s"
    if options.restart_job_on_worker_restart:
        scheduling["restartJobOnWorkerRestart"] = True
    if options.disable_retries:
        scheduling["disableRetries"] = True
    return scheduling


def _pools(job: Job, options: Options) -> list[dict[str, Any]]:
    machine = MACHINES[options.machine]
    pools = [_training(job, options, machine, replicas=1)]
    if job.nodes > 1:
        pools.append(_training(job, options, machine, replicas=job.nodes - 1))
    if options.reduction_server:
        pools.append(_reduction(options.reducers or reducers_for(job.nodes, machine)))
    if options.evaluator is not None:  # its place in the list is its role
        pools += [{}] * (3 - len(pools)) + [dict(options.evaluator)]
    return pools


def _training(job: Job, options: Options, machine: Machine, *, replicas: int) -> dict[str, Any]:
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
    if options.boot_disk_gb is not None:
        pool["diskSpec"] = {"bootDiskSizeGb": options.boot_disk_gb}
    if options.nfs:
        pool["nfsMounts"] = [
            {"server": server, "path": path, "mountPoint": name}
            for server, path, name in (each.split(":") for each in options.nfs)
        ]
    return pool


def _reduction(replicas: int) -> dict[str, Any]:
    return {
        "machineSpec": {"machineType": REDUCER},
        "replicaCount": str(replicas),
        "containerSpec": {"imageUri": REDUCER_IMAGE},
    }
