"""Submit a run to Kubernetes by kubectl."""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import yaml

from megavlm.command_line.parsing import parse
from megavlm.errors import UserError
from megavlm.metrics.secrets import without_secrets
from megavlm.programs.launch.checks import check_flags
from megavlm.programs.launch.job import Job
from megavlm.programs.launch.kubernetes_job import CONFIG, Options, complaints, objects
from megavlm.programs.launch.profile import pairs, read_profile


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="megavlm", help="Name of the job; default: megavlm.")
    parser.add_argument("--namespace", help="Namespace; default: that of kubectl.")
    parser.add_argument("--image", required=True, help="Container image, of launch/docker/Dockerfile.")
    parser.add_argument("--jobset", action="store_true", help="Make a JobSet, which needs its operator, not a Job.")
    parser.add_argument(
        "--volume", action="append", default=[], metavar="CLAIM:/PATH", help="Shared storage that all pods mount."
    )
    parser.add_argument(
        "--resource",
        action="append",
        default=[],
        metavar="NAME=N",
        help="Needed beside GPUs: rdma/ib=8, cpu=96.",
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="Variable of the pods.")
    parser.add_argument(
        "--node-selector", action="append", default=[], metavar="LABEL=VALUE", help="Label of the machines to run on."
    )
    parser.add_argument("--shm", default="64Gi", metavar="SIZE", help="Shared memory of a pod; default: 64Gi.")
    parser.add_argument("--service-account", help="Service account of the pods.")
    parser.add_argument("--pull-secret", metavar="NAME", help="Secret with which the image is pulled.")
    parser.add_argument("--priority-class", metavar="NAME", help="Priority class of the pods.")
    parser.add_argument("--queue", metavar="NAME", help="Local queue of Kueue, which starts the job.")
    parser.add_argument(
        "--max-lost-pods", type=int, default=100, metavar="N", help="Killed pods that are replaced; default: 100."
    )


def launch(given: argparse.Namespace, flags: Sequence[str]) -> int:
    """Check a job and submit it, or print it; return the exit status."""
    changed, config_file = with_config_map(flags)
    options = options_of(given, config_file)
    job = Job(given.nodes, given.gpus_per_node or 8, changed)
    for complaint in complaints(parse(flags), job, options):
        raise UserError(complaint)
    if not given.skip_checks:
        check_flags(flags, job, gpu=given.gpu, shared=True)
    if given.dry_run:
        options = replace(options, variables=without_secrets(options.variables))
    manifest = yaml.safe_dump_all(objects(job, options), sort_keys=False, width=120)
    if given.dry_run:
        print(manifest, end="")
        return 0
    try:
        return subprocess.run(["kubectl", "create", "-f", "-"], input=manifest, text=True, check=False).returncode
    except FileNotFoundError:
        raise UserError("kubectl is not installed here: --dry-run prints what it is to create") from None


def options_of(given: argparse.Namespace, config_file: tuple[str, str] | None) -> Options:
    """Return the options of a command line."""
    own = {each.name: getattr(given, each.name) for each in fields(Options) if hasattr(given, each.name)}
    return Options(
        **own
        | {
            "volumes": tuple(given.volume),
            "resources": pairs("--resource", given.resource),
            "variables": {**read_profile(given.profile), **pairs("--env", given.env)},
            "node_selector": pairs("--node-selector", given.node_selector),
            "config_file": config_file,
            "identity": f"{given.name}-{int(time.time()):x}",
        }
    )


def with_config_map(flags: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, str] | None]:
    """Return the flags as pods are to have them, and name and content of the file of --config if it is here."""
    changed = list(flags)
    for place, word in enumerate(changed):
        flag, equals, value = word.partition("=")
        if flag != "--config" or (not equals and place + 1 == len(changed)):
            continue
        path = Path(value if equals else changed[place + 1])
        if not path.is_file():
            continue  # parsing says so
        inside = f"{CONFIG}/{path.name}"
        changed[place + (not equals)] = f"--config={inside}" if equals else inside
        return tuple(changed), (path.name, path.read_text(encoding="utf-8"))
    return tuple(changed), None
