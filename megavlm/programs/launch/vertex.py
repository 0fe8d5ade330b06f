"""Submit a run to Vertex AI through Google's SDK; where that is not installed, print the commands of gcloud for it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megavlm.command_line.parsing import parse
from megavlm.errors import UserError
from megavlm.files import replace_file
from megavlm.metrics.secrets import without_secrets
from megavlm.programs.launch.checks import check_flags
from megavlm.programs.launch.job import Command, Job
from megavlm.programs.launch.profile import pairs, read_profile
from megavlm.programs.launch.vertex_job import Options, complaints, custom_job, in_container, run_dir_of
from megavlm.programs.launch.vertex_machines import MACHINES

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="megavlm", help="Name of the job; default: megavlm.")
    parser.add_argument("--region", required=True, help="Region, such as us-central1.")
    parser.add_argument("--project", help="Project's id; default: that of the credentials.")
    parser.add_argument("--image", required=True, help="Container image, of launch/docker/Dockerfile, in a registry.")
    parser.add_argument("--machine", required=True, metavar="TYPE", help="Machine type, such as a3-megagpu-8g.")
    parser.add_argument("--accelerator", metavar="TYPE", help="Check that the machine has it: NVIDIA_H100_80GB, …")
    parser.add_argument(
        "--strategy",
        choices=("STANDARD", "SPOT", "FLEX_START"),
        default="STANDARD",
        help="STANDARD: on demand. SPOT: cheaper machines that may be taken. FLEX_START: wait until all are free.",
    )
    parser.add_argument("--timeout", default="7d", metavar="TIME", help="Longest run, as 12h or 3d; default: 7d.")
    parser.add_argument("--max-wait", metavar="TIME", help="FLEX_START: longest wait; 0 for ever; default: 24h.")
    parser.add_argument(
        "--restart-job-on-worker-restart",
        action="store_true",
        help="Restart all replicas with one. Default: the others wait for it and go on from the newest checkpoint.",
    )
    parser.add_argument("--disable-retries", action="store_true", help="Never restart anything.")
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
    parser.add_argument("--service-account", metavar="EMAIL", help="Account that the replicas act as.")
    parser.add_argument("--tensorboard", help="Vertex AI TensorBoard: projects/…/locations/…/tensorboards/NUMBER.")
    parser.add_argument("--boot-disk-gb", type=int, metavar="N", help="Size of each boot disk; default: 100.")
    parser.add_argument(
        "--reduction-server", action="store_true", help="Sum gradients on CPU machines: all-reduce on A2 machines only."
    )
    parser.add_argument("--reducers", type=int, metavar="N", help="Number of those; default: as much bandwidth.")
    parser.add_argument(
        "--evaluator", metavar="FILE", help="Fourth pool, which does not train: a WorkerPoolSpec as JSON or YAML."
    )
    parser.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help="Label of the job.")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="Variable of the replicas.")


def launch(given: argparse.Namespace, flags: Sequence[str]) -> int:
    """Check a job and submit it, or print it; return the exit status."""
    options = options_of(given)
    machine = MACHINES.get(options.machine)
    processes = given.gpus_per_node or (machine.count if machine is not None else 8)
    flags, uploads = staged(flags, options)
    job = Job(given.nodes, processes, flags)
    here = local_flags(job.flags, uploads)
    for complaint in complaints(parse(here), job, options):
        raise UserError(complaint)
    if not given.skip_checks:
        check_flags(here, job, gpu=given.gpu, shared=True)
    if given.dry_run:
        options = replace(options, variables=without_secrets(options.variables))
    described = custom_job(job, options)
    if given.dry_run:
        print(json.dumps({"parent": _parent(options), "customJob": described, "uploads": uploads}, indent=2))
        return 0
    return _submit(described, options, uploads)


def options_of(given: argparse.Namespace) -> Options:
    """Return the options of a command line."""
    own = {each.name: getattr(given, each.name) for each in fields(Options) if hasattr(given, each.name)}
    return Options(
        **own
        | {
            "timeout": seconds("--timeout", given.timeout),
            "max_wait": None if given.max_wait is None else seconds("--max-wait", given.max_wait),
            "nfs": tuple(given.nfs),
            "labels": pairs("--label", given.label),
            "variables": {**read_profile(given.profile), **pairs("--env", given.env)},
            "evaluator": None if given.evaluator is None else _pool(Path(given.evaluator)),
        }
    )


def seconds(option: str, text: str) -> int:
    """Return the seconds of 90, 90s, 15m, 12h or 3d."""
    if match := re.fullmatch(r"(\d+)([smhd]?)", text):
        return int(match[1]) * _UNITS[match[2] or "s"]
    raise UserError(f"{option} {text} must be a whole number of seconds, or one with s, m, h or d")


def staged(flags: Sequence[str], options: Options) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the flags as replicas are to have them, and which files to upload where.

    A file of --config is put into the staging bucket, and RUN_DIR into the base output directory if it has no other.
    """
    changed, uploads = list(flags), {}
    for place, word in enumerate(changed):
        flag, equals, value = word.partition("=")
        if flag != "--config" or (not equals and place + 1 == len(changed)):
            continue
        path = value if equals else changed[place + 1]
        if path.startswith(options.mounts):
            continue
        if options.staging_bucket is None:
            raise UserError(f"--config {path} is on this machine: name a --staging-bucket for it, or a path in /gcs/")
        url = f"{options.staging_bucket.rstrip('/')}/{options.name}/{Path(path).name}"
        uploads[path] = url
        changed[place + (not equals)] = f"--config={in_container(url)}" if equals else in_container(url)
    if (folder := run_dir_of(options)) is not None and not any(word.partition("=")[0] == "--run-dir" for word in flags):
        changed += ["--run-dir", folder]
    return tuple(changed), uploads


def local_flags(flags: Sequence[str], uploads: Mapping[str, str]) -> tuple[str, ...]:
    """Return flags with the files of this machine in place of their copies."""
    back = {in_container(url): path for path, url in uploads.items()}
    back |= {f"--config={url}": f"--config={path}" for url, path in list(back.items())}
    return tuple(back.get(word, word) for word in flags)


def _pool(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        pool = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--evaluator {path} cannot be read: {str(error).partition(chr(10))[0]}") from None
    needed = ("machineSpec", "replicaCount", "containerSpec")
    if not isinstance(pool, dict) or not all(key in pool for key in needed):
        raise UserError(f"--evaluator {path} must be a WorkerPoolSpec with {', '.join(needed)}")
    return pool


def _parent(options: Options) -> str:
    return f"projects/{options.project or _default_project()}/locations/{options.region}"


def _default_project() -> str:
    """Return the project of this machine's credentials, or words for it where they are not to be read here."""
    try:
        import google.auth

        return google.auth.default()[1] or "PROJECT"
    except (ImportError, OSError, ValueError):
        return "PROJECT"
    except Exception as error:  # google.auth's own
        raise UserError(f"--project is not given, and no other is known: {str(error).partition('.')[0]}") from None


def _submit(described: Mapping[str, Any], options: Options, uploads: Mapping[str, str]) -> int:
    try:
        from google.cloud import aiplatform_v1
    except ImportError:
        return _print_commands(described, options, uploads)
    for path, url in uploads.items():
        _upload(path, url)
    endpoint = {"api_endpoint": f"{options.region}-aiplatform.googleapis.com"}
    client = aiplatform_v1.JobServiceClient(client_options=endpoint)
    job = aiplatform_v1.CustomJob.from_json(json.dumps(described))
    print(client.create_custom_job(parent=_parent(options), custom_job=job).name)
    return 0


def _upload(path: str, url: str) -> None:
    from google.cloud import storage

    storage.Blob.from_string(url, client=storage.Client()).upload_from_filename(path)


def _print_commands(described: Mapping[str, Any], options: Options, uploads: Mapping[str, str]) -> int:
    """Write the specification to a file, and print the commands that submit it."""
    file = Path(f"{re.sub(r'[^A-Za-z0-9._-]', '-', options.name)}.vertex.json")
    replace_file(file, json.dumps(described["jobSpec"], indent=2) + "\n")
    print("google-cloud-aiplatform is not installed (pip install -e '.[vertex]'): submit the job by", file=sys.stderr)
    print(*gcloud_commands(described, options, uploads, file=str(file)), sep="\n")
    return 0


def gcloud_commands(
    described: Mapping[str, Any], options: Options, uploads: Mapping[str, str], *, file: str
) -> list[Command]:
    """Return the commands of gcloud that upload files and create a job whose specification is in `file`."""
    copies = [Command(("gcloud", "storage", "cp", path, url)) for path, url in uploads.items()]
    words = ["gcloud", "ai", "custom-jobs", "create", f"--region={options.region}", f"--display-name={options.name}"]
    words += [f"--config={file}", *([f"--project={options.project}"] if options.project else [])]
    if labels := described.get("labels"):
        words.append("--labels=" + ",".join(f"{key}={value}" for key, value in labels.items()))
    return [*copies, Command(tuple(words))]
