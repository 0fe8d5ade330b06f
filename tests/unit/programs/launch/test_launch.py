"""What a launcher would send, and what it refuses to send, without a scheduler."""

from __future__ import annotations

import os
import re
import subprocess
from argparse import Namespace
from pathlib import Path

import psutil
import pytest
from torch.distributed.run import get_args_parser

from megavlm.command_line.parsing import parse
from megavlm.errors import UserError
from megavlm.programs.launch import slurm
from megavlm.programs.launch.checks import complaints, filesystem_of, read_profile
from megavlm.programs.launch.job import Job, agent
from megavlm.programs.launch.launch import main
from tests.support.forked import ROOT


@pytest.fixture(autouse=True)
def mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"/": "ext4", "/home": "nfs4", "/home/me/scratch": "tmpfs", "/big data": "lustre"}
    found = [Namespace(mountpoint=place, fstype=kind) for place, kind in kinds.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/homes/me", "ext4"), ("/home/me/scratch/runs", "tmpfs"), ("/big data/runs", "lustre")],
)
def test_the_file_system_of_a_path_is_that_of_its_longest_mount(path: str, kind: str):
    assert filesystem_of(Path(path)) == kind


@pytest.mark.parametrize(
    ("flags", "nodes", "shared", "found"),
    [
        ("--tp 2 --run-dir /home/me/runs", 2, False, []),
        ("--tp 2 --run-dir /tmp/runs", 1, False, []),
        ("--tp 2 --run-dir /tmp/runs", 2, True, []),
        ("--tp 2 --run-dir /tmp/runs", 2, False, ["--run-dir /tmp/runs is on ext4"]),
        ("--tp 4 --run-dir /home/me/runs", 2, False, ["--tp 4 is wider than a node of 2 GPUs"]),
    ],
)
def test_what_cannot_run_on_nodes_is_one_line(flags: str, nodes: int, shared: bool, found: list[str]):
    job = Job(nodes, 2, tuple(flags.split()))
    told = list(complaints(parse(job.flags), job, gpu=None, shared=shared))
    assert len(told) == len(found)
    assert all(line in each and "\n" not in each for line, each in zip(found, told, strict=True))


BIG = (
    "--set model.language.num_layers=32 model.language.hidden_size=4096 model.language.ffn_hidden_size=11008 "
    "--seq-length 4096 --set model.language.num_attention_heads=32 model.language.vocab_size=32000 --precision bf16 "
    "--data synthetic"
).split()


@pytest.mark.parametrize(
    ("gpu", "flags", "line"),
    [
        ("h100", "--tp 8 --data-parallel-sharding optimizer", None),
        (
            "h100",
            "--data-parallel-sharding none",
            r"estimated to need [\d.]+ GiB on its fullest rank, more than the [\d.]+ GiB",
        ),
        ("h1000", "", "h100"),
    ],
)
def test_memory_is_estimated_for_the_named_gpu(gpu: str, flags: str, line: str | None):
    job = Job(2, 8, (*BIG, *flags.split(), "--gbs", "16"))
    try:
        told = "".join(complaints(parse(job.flags), job, gpu=gpu, shared=True))
    except UserError as error:
        told = str(error)
    assert (told == "") if line is None else re.search(line, told), told


def test_a_slurm_job_is_one_command():
    """Values with spaces and commas reach the job as they are."""
    job = Job(16, 8, ("--config", "my run.yaml", "--tp", "8"))
    command = slurm.specification(job, ["--time=2-0", "--partition", "gpu"], profile="infiniband", image="a#b,c")
    assert str(command) == (
        "MEGAVLM_PROFILE=infiniband MEGAVLM_IMAGE='a#b,c' MEGAVLM_PROCESSES=8 sbatch --nodes=16 --gpus-per-node=8 "
        "--time=2-0 --partition gpu launch/slurm.sbatch --config 'my run.yaml' --tp 8"
    )
    with pytest.raises(UserError, match="--nodes is given twice"):
        slurm.specification(job, ["--nodes=3"])


VERTEX, ON_GCS = "vertex --nodes 2 --region r --image i --machine a3-megagpu-8g", "--run-dir /gcs/bucket/run"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            "slurm --nodes 2 --gpus-per-node 2 --run-dir-is-shared -- --tp 3",
            "not divisible by --tp 3: use 63 or 66",
        ),
        ("slurm --nodes 2 --gpus-per-node 2 --run-dir-is-shared -- --tp 4", "wider than a node"),
        ("slurm --nodes 0 -- --tp 1", "--nodes: 0 must be a whole number from 1"),
        ("slurm --nodes 2 -- --no-such-flag", "--no-such-flag"),
        ("slurm --nodes 2 --profile warp -- --tp 1", "choose one of aws-efa, azure-ndv5, ethernet, gcp-rdma, gcp-tcpx"),
        ("kubernetes --image i --env A;$(x)=1 -- --tp 1", r"--env A;\$\(x\) is no name of a variable: use letters"),
        ("local --nodes 2 --time 3 -- --tp 1", "--time is no option of this program"),
        ("slurm --nodes 2 --recipe demo", "--recipe is no option of this program: flags of the run come after --"),
        ("local --nodes 1 --gpus-per-node 2 -- --tp 3 --no-sp", "ask for as many by --nodes and --gpus-per-node"),
        (f"{VERTEX} --strategy CHEAP -- {ON_GCS}", "CHEAP"),
        (f"{VERTEX} --timeout soon -- {ON_GCS}", "soon must be a whole number of seconds"),
        (f"{VERTEX} --label team -- {ON_GCS}", "--label team must be NAME=VALUE"),
        (f"{VERTEX} --spot -- {ON_GCS}", "--spot is no option of this program"),
        (f"{VERTEX} -- {ON_GCS} --config run.yaml", "--config run.yaml is on this machine: name a --staging-bucket"),
        (f"{VERTEX} --machine a2-highgpu-2g -- {ON_GCS} --tp 4", "--tp 4 is wider than a node of 2 GPUs"),
        ("vertex --nodes 2 --machine a3-megagpu-8g", "required: --region, --image"),
    ],
)
def test_a_mistake_ends_here_and_not_in_the_queue(
    argv: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch
):
    monkeypatch.chdir(ROOT)
    assert main(argv.split()) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert re.search(line, told), told


@pytest.mark.parametrize("argv", ["slurm -- --tp 1", "local --profile roce -- --tp 1"])
def test_what_only_a_clone_has_is_named(argv: str, capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert main(argv.split()) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "a clone of the repository" in told


def test_a_dry_run_prints_what_would_be_sent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    sent = "--nodes 2 --gpus-per-node 2 --dry-run"
    assert main(["slurm", *sent.split(), "--run-dir-is-shared", "--time=60", "--", "--tp", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "MEGAVLM_PROCESSES=2 sbatch --nodes=2 --gpus-per-node=2 --time=60 launch/slurm.sbatch --tp 2"
    ]
    assert main(["local", *sent.split(), "--", "--tp", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "CUDA_VISIBLE_DEVICES=0,1" in first
    assert "CUDA_VISIBLE_DEVICES=2,3" in second
    assert "--node-rank 1" in second


def test_torchrun_leaves_its_ranks_the_grace_after_each_signal():
    """By itself it would kill them 30 s after SIGTERM, and die of SIGUSR1."""
    command = agent(Job(2, 8, ("--tp", "8")), 1, address="host", port=29500, grace=77)
    read = get_args_parser().parse_args(command.words[command.words.index("torch.distributed.run") + 1 :])
    assert command.environment == {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "77"}
    assert read.signals_to_handle == "SIGTERM,SIGINT,SIGHUP,SIGUSR1"


@pytest.mark.parametrize("content", ["A='unclosed", "A=1\nB", "\udcff"])
def test_a_profile_that_is_none_is_one_line(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch/profiles").mkdir(parents=True)
    (tmp_path / "launch/profiles/own.env").write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match=r"^--profile own: launch/profiles/own.env must have lines NAME=VALUE[^\n]*$"):
        read_profile("own")


@pytest.mark.parametrize("path", sorted((ROOT / "launch/profiles").glob("*.env")), ids=lambda path: path.stem)
def test_each_setting_of_a_profile_has_its_source_and_a_name_that_is_known(path: Path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for paragraph in path.read_text().split("\n\n"):
        assert not paragraph.strip() or paragraph.startswith("#"), paragraph
    lines = path.read_text().splitlines()
    settings = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    assert settings
    for number in settings:
        assert re.fullmatch(r"(NCCL|FI|TORCH)_[A-Z0-9_]+=(\S+|\"\S+\")", lines[number]), lines[number]
        assert lines[number - 1].startswith("# Source: https://"), lines[number]
    shell = f"set -aeu; source {path}; env"
    shown = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True, env=dict(os.environ))
    # Containers get them by name and value, a batch script by the shell: both must read the same.
    read = [f"{name}={value}" for name, value in read_profile(path.stem).items()]
    assert len(read) == len(settings)
    assert set(read) <= set(shown.stdout.splitlines())
