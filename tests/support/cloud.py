"""Checks of specifications by their publishers' own packages, which live in an environment of their own.

`make cloud-tools` installs google-cloud-aiplatform (hundreds of MB) and kubernetes-validate into build/cloud;
MEGAVLM_CLOUD_PYTHON names the Python of another such environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megavlm.programs.launch.kubernetes import completed
from megavlm.programs.launch.launch import _parser
from tests.support.forked import ROOT

PYTHON = Path(os.environ.get("MEGAVLM_CLOUD_PYTHON", ROOT / "build/cloud/bin/python"))
needs_cloud_tools = pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}: `make cloud-tools` installs it")

_VERTEX = """
import json, sys
from google.cloud.aiplatform_v1.types import CreateCustomJobRequest, CustomJob
from google.protobuf import json_format
for job in json.load(sys.stdin):
    try:
        parsed = json_format.ParseDict(job, CustomJob.pb()())
        sent = CreateCustomJobRequest(parent="p", custom_job=CustomJob.from_json(json.dumps(job)))  # as vertex.py does
        assert CustomJob.pb(sent.custom_job) == parsed
        print(json.dumps({"job": json_format.MessageToDict(parsed)}))
    except json_format.ParseError as error:
        print(json.dumps({"error": str(error)}))
"""
_KUBERNETES = """
import json, sys
import kubernetes_validate
for object_ in json.load(sys.stdin):
    try:
        kubernetes_validate.validate(object_, sys.argv[1], strict=True)
        print(json.dumps({}))
    except Exception as error:
        print(json.dumps({"error": str(error).splitlines()[0]}))
"""


def vertex_options(name: str, region: str, image: str, machine: str, **more: object) -> Namespace:
    """Return the options of `megavlm launch vertex`, with others than their defaults."""
    words = f"--name={name}|--region={region}|--image={image}|--machine={machine}"
    return changed(_parser().parse_args(["vertex", *words.split("|")]), **{"labels": {}, "variables": {}, **more})


def kubernetes_options(name: str, image: str, **more: object) -> Namespace:
    """Return the options of `megavlm launch kubernetes`, with others than their defaults."""
    given = _parser().parse_args(["kubernetes", f"--name={name}", f"--image={image}"])
    return changed(completed(given), **{"identity": name, "variables": {}, **more})


def changed(options: Namespace, **changes: object) -> Namespace:
    return Namespace(**{**vars(options), **changes})


def parsed_by_vertex(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each CustomJob as Google's own messages hold it ("job"), or what they say against it ("error")."""
    return _asked(_VERTEX, jobs)


def validated_by_kubernetes(objects: Sequence[dict[str, Any]], version: str) -> list[dict[str, Any]]:
    """Return what the schemas of a version of Kubernetes say against each object ("error"); empty: nothing."""
    return _asked(_KUBERNETES, objects, version)


def _asked(program: str, given: Sequence[dict[str, Any]], *argv: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(PYTHON), "-c", program, *argv],
        input=json.dumps(list(given)),
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
