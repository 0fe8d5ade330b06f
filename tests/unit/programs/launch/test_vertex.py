"""The CustomJob that a launcher would send to Vertex AI, and what it refuses to send."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from megavlm.command_line.parsing import parse
from megavlm.planner.hardware import find_machine
from megavlm.programs.launch.job import Job
from megavlm.programs.launch.launch import main
from megavlm.programs.launch.vertex import MACHINES, complaints, custom_job
from tests.support.cloud import changed, needs_cloud_tools, parsed_by_vertex, vertex_options
from tests.support.forked import ROOT

GOLDEN = Path(__file__).parent / "golden"
IMAGE = "us-docker.pkg.dev/my-project/training/megavlm:1"
PLAIN = vertex_options("run", "us-central1", IMAGE, "a3-megagpu-8g")
FULL = vertex_options(
    "llava, stage 2",
    "europe-west4",
    IMAGE,
    "a2-highgpu-8g",
    project="my-project",
    strategy="SPOT",
    timeout=3 * 86_400,
    base_output_dir="gs://bucket/runs/1",
    nfs=("10.0.0.2:/share:data",),
    network="projects/12345/global/networks/training",
    service_account="trainer@my-project.iam.gserviceaccount.com",
    labels={"team": "vision"},
    variables={"NCCL_DEBUG": "WARN", "HF_HUB_OFFLINE": "1"},
)
JOBS = {
    "one-machine": (Job(1, 8, ("--run-dir", "/gcs/bucket/run")), PLAIN),
    "all-options": (Job(4, 8, ("--config", "/gcs/bucket/run.yaml", "--run-dir", "/mnt/nfs/data/run")), FULL),
    "flex-start": (
        Job(16, 8, ("--run-dir", "/gcs/bucket/run", "--tp", "8")),
        changed(PLAIN, machine="a4-highgpu-8g", strategy="FLEX_START", max_wait=2 * 86_400),
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_what_it_was(name: str):
    """Written by `json.dumps(custom_job(…), indent=2)` and read through once against the reference of the API."""
    assert custom_job(*JOBS[name]) == json.loads((GOLDEN / f"vertex-{name}.json").read_text())


@pytest.mark.slow  # their imports take 15 s
@needs_cloud_tools
def test_googles_own_messages_take_each_machine_and_option():
    """No field is unknown to them, no value of an enum, and none is lost: what they hold is what was given."""
    jobs = [custom_job(job, options) for job, options in JOBS.values()]
    for machine in MACHINES.values():
        options = changed(PLAIN, machine=machine.name, strategy="SPOT")
        jobs.append(custom_job(Job(3, machine.count, ()), options))
    wrong = [{**jobs[0], "jobSpec": {**jobs[0]["jobSpec"], "scheduling": {"strategy": "NEVER"}}}, {"name_": "a"}]
    *told, strategy, field = parsed_by_vertex([*jobs, *wrong])
    for job, answer in zip(jobs, told, strict=True):
        assert _without_empty(answer["job"]) == _without_empty(job), answer
    assert "error" in strategy
    assert "error" in field


def _without_empty(value: object) -> object:
    """What messages keep: empty lists and objects are left out, but for a pool that is skipped."""
    if isinstance(value, dict):
        cleaned = {key: _without_empty(each) for key, each in value.items()}
        return {key: each for key, each in cleaned.items() if each not in ([], {})}
    return [_without_empty(each) for each in value] if isinstance(value, list) else value


def test_machines_have_their_accelerators():
    """The number in a name is that of its GPUs."""
    assert (MACHINES["g2-standard-48"].accelerator, MACHINES["g2-standard-48"].count) == ("NVIDIA_L4", 4)
    for machine in MACHINES.values():
        if found := re.search(r"-(\d+)g$", machine.name):
            assert machine.count == int(found[1])
        planned = find_machine(machine.name)
        assert planned is not None
        assert planned.gpus == machine.count
        assert planned.gpu.split("-")[0].upper() in machine.accelerator, "its memory is checked"
        assert all((ROOT / f"launch/profiles/{profile}.env").exists() for profile in machine.profiles)


ON_GCS = "--run-dir /gcs/bucket/run"


@pytest.mark.parametrize(
    ("changes", "nodes", "flags", "line"),
    [
        ({}, 2, ON_GCS, None),
        (dict(strategy="SPOT", machine="a3-highgpu-8g", profile="gcp-tcpx"), 2, ON_GCS, None),
        (dict(machine="a5-highgpu-8g"), 2, ON_GCS, "--machine a5-highgpu-8g is no GPU machine"),
        (dict(machine="a2-highgpu-4g"), 2, ON_GCS, "--gpus-per-node 8: a2-highgpu-4g has 4 GPUs"),
        (dict(profile="gcp-tcpx"), 2, ON_GCS, "--profile gcp-tcpx is for other machines"),
        (dict(base_output_dir="/bucket"), 2, ON_GCS, "--base-output-dir /bucket must be gs://BUCKET"),
        (dict(staging_bucket="gs://"), 2, ON_GCS, "--staging-bucket gs:// must be"),
        (dict(nfs=("server:share",), network=FULL.network), 2, ON_GCS, "--nfs server:share must be SERVER:/PATH:NAME"),
        (dict(nfs=("server:/share:data",)), 2, ON_GCS, "--nfs needs --network"),
        ({}, 2, "--run-dir runs/1", "--run-dir runs/1 is on the disk of each replica and lost with it"),
        ({}, 2, "--run-dir /gcsx/1", "--run-dir /gcsx/1 is on the disk of each replica"),
        ({}, 2, "--run-dir /gcs/../run", "--run-dir /gcs/../run is on the disk of each replica"),
        (dict(base_output_dir="gs://bucket/../../x"), 2, ON_GCS, "--base-output-dir"),
        ({}, 2, f"{ON_GCS} --name x$(X)", "Vertex AI puts variables where $( stands"),
    ],
)
def test_a_specification_that_cannot_run_is_refused_in_one_line(
    changes: dict, nodes: int, flags: str, line: str | None
):
    config, _, name = flags.partition(" --name ")
    job = Job(nodes, 8, ("--name", f"a\n{name}") if name else ())
    told = list(complaints(parse(config.split()), job, changed(PLAIN, **changes)))
    assert all("\n" not in each for each in told)
    assert told == [] if line is None else any(line in each for each in told), told


COMMAND = f"vertex --nodes 2 --region us-central1 --project my-project --image {IMAGE} --machine a3-megagpu-8g"


def test_a_dry_run_prints_all_that_would_be_sent(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path):
    """A file of --config is uploaded, and read there; RUN_DIR is in the base output directory."""
    monkeypatch.chdir(ROOT)
    config = tmp_path / "run.yaml"
    config.write_text("parallel: {tensor_model_parallel_size: 4}\n")
    places = "--base-output-dir gs://bucket/out --staging-bucket gs://stage/jobs/ --name first --profile gcp-tcpxo"
    assert main([*COMMAND.split(), *places.split(), "--dry-run", "--", "--config", str(config)]) == 0
    sent = json.loads(capsys.readouterr().out)
    assert sent["parent"] == "projects/my-project/locations/us-central1"
    url = sent["uploads"][str(config)]
    assert re.fullmatch("gs://stage/jobs/first/[0-9a-f]{12}/run.yaml", url)
    first, others = sent["customJob"]["jobSpec"]["workerPoolSpecs"]
    assert (first["replicaCount"], others["replicaCount"]) == ("1", "1")
    assert first["containerSpec"] == others["containerSpec"]
    flags = first["containerSpec"]["args"]
    assert flags[flags.index("--") + 1 :] == [
        "--config",
        url.replace("gs://", "/gcs/"),
        "--run-dir",
        "/gcs/bucket/out/run",
    ]
    assert {"name": "NCCL_FASTRAK_CTRL_DEV", "value": "eth0"} in first["containerSpec"]["env"]
    config.write_text("parallel: {tensor_model_parallel_size: 2}\n")  # of a second job, while the first one waits
    assert main([*COMMAND.split(), *places.split(), "--dry-run", "--", "--config", str(config)]) == 0
    assert json.loads(capsys.readouterr().out)["uploads"][str(config)] != url


def test_a_file_is_uploaded_in_the_project_that_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Google's client refuses to begin where no project is given and the credentials have none."""
    monkeypatch.chdir(ROOT)
    clients = SimpleNamespace(aiplatform_v1=Mock(), storage=Mock())
    monkeypatch.setitem(sys.modules, "google.cloud", clients)
    (config := tmp_path / "run.yaml").write_text("train: {train_iters: 2}\n")
    places = "--base-output-dir gs://bucket/out --staging-bucket gs://stage --skip-checks"
    assert main([*COMMAND.split(), *places.split(), "--", "--config", str(config)]) == 0
    clients.storage.Client.assert_called_once_with("my-project")
