"""What a launcher would send and refuses to send, word by word, and how attempts end, without a scheduler."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from argparse import Namespace
from pathlib import Path

import psutil
import pytest
import yaml
from torch.distributed.elastic.utils import macros
from torch.distributed.run import get_args_parser

from megavlm.command_line.parsing import parse
from megavlm.errors import UserError
from megavlm.programs.launch import kubernetes, launch, node, slurm
from megavlm.programs.launch.attempt import Account
from megavlm.programs.launch.checks import complaints, filesystem_of, read_profile
from megavlm.programs.launch.job import Command, Job, agent
from megavlm.programs.launch.launch import _words_of_job, main
from megavlm.programs.launch.meeting import MachinePart
from megavlm.programs.sweep.grid import Grid, variants_of
from megavlm.programs.sweep.training import flags_folder, write_flags
from tests.support.cloud import PYTHON, kubernetes_options
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


UNSHARDED = " ".join([*BIG, "--data-parallel-sharding none --gbs 16"])
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
        (f"{VERTEX} --machine a2-highgpu-8g -- {ON_GCS} {UNSHARDED}", "that tensors may take on a100-40gb"),
        (f"{VERTEX} --machine a3-highgpu-4g -- {ON_GCS} {UNSHARDED}", "that tensors may take on h100"),
    ],
)
def test_a_mistake_ends_here_and_not_in_the_queue(
    argv: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch
):
    monkeypatch.chdir(ROOT)
    assert main(argv.split()) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert re.search(line, told), told


def test_a_job_file_is_a_command(tmp_path: Path):
    (tmp_path / "job.yaml").write_text(
        "launch: slurm\nrun_dir_is_shared: true\nenv: [A=1, B=2]\ntime: 12:00:00\nflags: >-\n  --name 'a b'\n  --tp 2\n"
    )
    own = "slurm --run-dir-is-shared --env=A=1 --env=B=2 --time=12:00:00 --dry-run -- --name".split()
    assert _words_of_job(tmp_path / "job.yaml", ["--dry-run"]) == [*own, "a b", "--tp", "2"]


SENT = {
    "slurm.yaml": "sbatch --nodes=8 --gpus-per-node=8 --partition=gpu --time=2-00:00:00 launch/slurm.sbatch --config",
    "vertex.yaml": '"machineType": "a3-highgpu-8g"',
    "kubernetes.yaml": "completionMode: Indexed",
}


def test_the_job_files_are_those_that_are_shown():
    assert {path.name for path in (ROOT / "launch").glob("*.yaml")} == SENT.keys()


@pytest.mark.parametrize("name", SENT)
def test_a_job_file_is_checked_and_printed(name: str, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main([f"--job=launch/{name}", "--dry-run"]) == 0
    assert SENT[name] in capsys.readouterr().out


def test_files_of_the_machines_are_not_asked_for_here(capsys: pytest.CaptureFixture[str], monkeypatch):
    """Of containers; who submits from a cluster's own nodes has the files of its jobs."""
    monkeypatch.chdir(ROOT)
    run = "--dry-run -- --datasets /mnt/x.jsonl --tokenizer /mnt/tok --seq-length 64 --run-dir /data/r"
    for kind, status in (("kubernetes --name a --image b --volume c:/data", 0), ("slurm --run-dir-is-shared", 2)):
        assert main([*kind.split(), *"--nodes 1 --gpus-per-node 1 --gpu h100".split(), *run.split()]) == status, kind
        assert ("memory is not checked: " in capsys.readouterr().err) == (status == 0)


@pytest.mark.parametrize(
    ("content", "more", "line"),
    [
        ("- slurm", "", "must have `launch: slurm`"),
        ("launch: slurm", "", "must have `launch: slurm`"),
        ("launch: slurm\nlaunch: local\nflags: ''", "", "job.yaml"),
        ("launch: moon\nflags: ''", "", "invalid choice: 'moon'"),
        ("launch: local\nflags: --tp '1", "", "flags cannot be read: No closing quotation"),
        ("launch: local\nnodes: {a: 1}\nflags: ''", "", "nodes must be a value, or a list of values"),
        ("launch: local\nnode: 1\nflags: ''", "", "--node=1 is no option of this program"),
        ("launch: local\nflags: ''", "-- --tp 2", "has the flags of the run"),
    ],
)
def test_a_mistake_in_a_job_file_is_one_line(content: str, more: str, line: str, capsys, tmp_path: Path):
    (tmp_path / "job.yaml").write_text(content)
    assert main(["--job", str(tmp_path / "job.yaml"), *more.split()]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert line in told


@pytest.mark.parametrize("argv", ["slurm -- --tp 1", "local --profile roce -- --tp 1"])
def test_what_only_a_clone_has_is_named(argv: str, capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert main(argv.split()) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "a clone of the repository" in told


def test_a_dry_run_prints_what_would_be_sent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launch, "gpus_here", list)  # none: as where a job is prepared for another machine
    sent = "--nodes 2 --gpus-per-node 2 --dry-run"
    assert main(["slurm", *sent.split(), "--run-dir-is-shared", "--time=60", "--", "--tp", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "MEGAVLM_PROCESSES=2 sbatch --nodes=2 --gpus-per-node=2 --time=60 launch/slurm.sbatch --tp 2"
    ]
    assert main(["local", *sent.split(), "--profile", "nvlink", "--", "--tp", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "CUDA_VISIBLE_DEVICES=0,1" in first
    assert "CUDA_VISIBLE_DEVICES=2,3" in second
    assert "--node-rank 1" in second
    assert all(f"{name}={value} " in first for name, value in read_profile("nvlink").items())
    monkeypatch.setattr(launch, "gpus_here", lambda: ["0", "1"])
    for visible, shown in ((None, None), ("4,5,6,7", "=6,7 "), ("", "='' "), ("4,5", None)):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert main(["local", *sent.split(), "--", "--tp", "2"]) == (0 if shown else 2)
        out, err = capsys.readouterr()
        assert f"CUDA_VISIBLE_DEVICES{shown}" in out or "4 processes need a GPU each, and 2 are visible" in err


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


def test_what_guides_set_is_in_a_profile_or_left_out_with_a_reason():
    profiles = "".join(path.read_text() for path in (ROOT / "launch/profiles").glob("*.env"))
    names = "IB_DISABLE IB_HCA SOCKET_IFNAME NET_GDR_LEVEL P2P_LEVEL BUFFSIZE CROSS_NIC PLUGIN_P2P DEBUG DEBUG_SUBSYS"
    assert [name for name in names.split() if not re.search(rf"NCCL_{name}\b", profiles)] == []


NASTY = (
    "", " ", "a b", "Instruct: find\nQuery: ", "\n$(touch ran) #", "`touch ran`", "$(touch ran)", "${HOME}",
    "$$", "$", "a$$b", "$$(HOME)", "x$(HOME)y$", "${local_rank}", "!!", "!1", "'", '"', "'; touch ran; '", "\\",
    "\\n", "a\\", "*", "~", "-n", "--", "--run-dir", "{a,b}", "a;b&c|d>e", "\t", "\r", "\x1b[31m", "é 漢字 🙂",
    "\u2028", "%j", "a=b", "#", "\x7f",
)  # fmt: skip


def path_of(folder: Path, **programs: str) -> str:
    """Return a PATH on which these programs come first, and `srun` starts one task here."""
    bin_ = folder / "bin"
    bin_.mkdir(exist_ok=True)
    for name, body in {"srun": 'while [ "${1:0:2}" = -- ]; do shift; done; exec "$@"', **programs}.items():
        (bin_ / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (bin_ / name).chmod(0o755)
    return f"{bin_}:{os.environ['PATH']}"


def received(script: str, folder: Path, **environment: str) -> list[list[str]]:
    """Run a script by bash, in which `python` writes down its words; return those of each call."""
    noting = f"printf '%s\\0' \"$@\" >>{folder}/got; printf '\\0END\\0' >>{folder}/got"
    path = path_of(folder, python=noting, scontrol="echo host")
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**environment, "PATH": path, "HOME": "/home/x"},
        capture_output=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    assert not (folder / "ran").exists(), "a value was executed"
    got = folder / "got"
    calls = got.read_bytes().split(b"\0\0END\0") if got.exists() else []
    got.unlink(missing_ok=True)
    return [os.fsdecode(call).split("\0") for call in calls[:-1]]


HERE = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "host", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("before", "after", "task"),
    [("(null)", "fake2", None), ("fake7,fake[8-9]", "fake7,fake[8-9],fake2", None), ("(null)", "fake2", "4")],
)
def test_a_job_starts_itself_again_without_the_faulty_node(before: str, after: str, task: str | None, tmp_path: Path):
    """The nodes that were excluded before stay excluded, and of an array only the task itself is requeued."""
    path = path_of(
        tmp_path,
        python='case "$3" in begin) echo file ;; end) echo again fake2 ;; esac',
        scontrol=f'echo "$*" >>{tmp_path}/asked; echo "JobId=1 ReqNodeList=(null) ExcNodeList={before} NumNodes=1"',
    )
    job = {**HERE, "SLURM_SUBMIT_DIR": str(tmp_path), "PATH": path}
    job |= {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": task} if task else {}
    done = subprocess.run(["bash", f"{ROOT}/launch/slurm.sbatch"], env=job, check=False)
    assert done.returncode == 75
    name = f"1_{task}" if task else "1"
    said = [f"show job --oneliner {name}", f"requeue {name}", f"update JobId={name} ExcNodeList={after}"]
    assert (tmp_path / "asked").read_text().splitlines()[-3:] == said


@pytest.mark.parametrize(("nodes", "cores"), [("96", 96), ("96(x2),48", 48), ("128(x16)", 128)])
def test_a_task_takes_as_many_cores_as_the_smallest_node_has(nodes: str, cores: int, tmp_path: Path) -> None:
    path = path_of(tmp_path, scontrol="echo host", srun=f'echo "$1" >>{tmp_path}/asked')
    job = {**HERE, "SLURM_JOB_CPUS_PER_NODE": nodes, "SLURM_SUBMIT_DIR": str(tmp_path), "PATH": path}
    subprocess.run(["bash", f"{ROOT}/launch/slurm.sbatch"], env=job, capture_output=True, check=False)
    assert (tmp_path / "asked").read_text().splitlines()[0] == f"--cpus-per-task={cores}"


def by_torchrun(words: list[str]) -> list[str]:
    substituted: list[str] = macros.substitute(words, "3")
    return substituted


def by_kubernetes(text: str) -> str:
    """Expand variables as k8s.io/kubernetes/third_party/forked/golang/expansion does: $(HOME), and $$ is $."""
    made, at = "", 0
    while at < len(text):
        if text[at] == "$" and at + 1 < len(text):
            if text[at + 1] == "(" and ")" in text[at:]:
                made, at = made + "EXPANDED", text.index(")", at) + 1
                continue
            made += "$" if text[at + 1] == "$" else text[at : at + 2]
            at += 2
            continue
        made, at = made + text[at], at + 1
    return made


def test_printed_commands_can_be_pasted(tmp_path: Path) -> None:
    command = Command(("python", *NASTY), {"A": NASTY[3]})
    (got,) = received(str(command), tmp_path)
    assert got == list(NASTY)


def test_the_script_of_slurm_passes_values_on(tmp_path: Path) -> None:
    """Those of an array's task, from its file; tasks after it have their own."""
    entries = [{"name": "one", "lr": 1}, {"name": "two", "query-prefix": list(NASTY)}, {"name": "three", "lr": 3}]
    grid = Grid(str(tmp_path / "runs"), list=entries)
    variants = variants_of(grid)
    folder = flags_folder(grid, variants)
    write_flags(grid, variants)
    for number in range(3):
        flags = list(variants[number].flags)
        _, training, _ = received(
            f"source {ROOT}/launch/slurm.sbatch",
            tmp_path,
            **{
                "MEGAVLM_ARRAY": str(folder),
                "SLURM_ARRAY_TASK_ID": str(number),
                "SLURM_SUBMIT_DIR": str(tmp_path),
            },
            **HERE,
        )
        assert by_torchrun(training[training.index("pretrain_vlm.py") + 1 :]) == flags
    missing = subprocess.run(
        ["bash", f"{ROOT}/launch/slurm.sbatch"],
        env={
            **os.environ,
            "MEGAVLM_ARRAY": str(folder),
            "SLURM_ARRAY_TASK_ID": "999",
            "SLURM_SUBMIT_DIR": str(tmp_path),
        },
        capture_output=True,
        check=False,
    )
    assert missing.returncode == 2


def test_kubernetes_and_torchrun_pass_values_on() -> None:
    job = Job(1, 1, NASTY)
    options = kubernetes_options("a", "image", variables={f"V{n}": text for n, text in enumerate(NASTY)})
    (made,) = (
        each
        for each in yaml.safe_load_all(yaml.safe_dump_all(kubernetes.objects(job, options)))
        if each["kind"] == "Job"
    )
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert tuple(map(by_kubernetes, container["args"]))[-len(NASTY) :] == NASTY
    assert [by_kubernetes(each["value"]) for each in container["env"]][: len(NASTY)] == list(NASTY)
    assert tuple(by_torchrun(list(agent(job, 0, address="a", port=1).words)))[-len(NASTY) :] == NASTY


@pytest.mark.parametrize(
    ("parts", "end"),
    [
        ([MachinePart(0), MachinePart(0)], "finished"),
        ([MachinePart(0, gone=True), MachinePart(0)], "finished"),
        (
            [MachinePart(2), MachinePart(75), MachinePart(None)],
            "mistake",
        ),  # torchrun ends the ranks beside it by SIGTERM
        ([MachinePart(3), MachinePart(None, gone=True)], "bad numbers"),
        ([MachinePart(75), MachinePart(75, gone=True)], "lost"),  # asked for by the platform
        ([MachinePart(None), MachinePart(None, gone=True)], "lost"),
        ([MachinePart(None), MachinePart(71)], "crash"),
        ([MachinePart(75), MachinePart(None)], "stopped"),
    ],
)
def test_an_attempt_ends_as_its_parts_say(parts: list[MachinePart], end: str):
    assert node.outcome(dict(enumerate(parts))) == end


def attempts(account: Account, *ends: str, crashes: int = 10) -> list[tuple[bool, int]]:
    """Whether the job goes on and its status after each attempt, none of which leaves a checkpoint."""
    told = []
    for end in ends:
        account.begin(max_crashes=crashes, unfinished="lost")
        decision = account.end(warned=True, max_crashes=crashes, end=end)  # type: ignore[arg-type]
        told.append((decision.again, decision.status))
        assert ("a machine was lost" in decision.reason) == (end == "lost")
    return told


def test_lost_machines_never_end_a_job_and_crashes_do(tmp_path: Path):
    assert attempts(Account(tmp_path / "lost", "j"), *["lost"] * 5) == [(True, 1)] * 5
    assert attempts(Account(tmp_path / "one", "j"), "lost", "crash") == [(True, 1), (True, 1)]
    assert attempts(Account(tmp_path / "mixed", "j"), "crash", "lost", "crash")[1:] == [(True, 1), (False, 1)]
    assert attempts(Account(tmp_path / "mistake", "j"), "lost", "mistake") == [(True, 1), (False, 2)]


def test_machine_0_that_is_replaced_finds_its_own_attempt_unfinished(tmp_path: Path):
    account = Account(tmp_path, "j")
    for _ in range(3):
        assert account.begin(max_crashes=1, unfinished="lost") is None
    assert account.decided(max_crashes=1) is None  # one is open
    written = json.loads((tmp_path / "jobs" / "j.json").read_text())
    assert [each["end"] for each in written["attempts"]] == ["lost", "lost"]


@pytest.mark.parametrize(("end", "status"), [("mistake", 2), ("finished", 0), ("lost", None)])
def test_a_container_that_is_started_again_after_the_decision_ends_at_once(
    end: str, status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Vertex AI restarts a replica whatever its exit status was; such a replica ends before it starts torchrun."""
    attempts(Account(tmp_path, "4711"), end)
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "4711")
    monkeypatch.delenv(node.JOB, raising=False)

    def reached(*_: object, **__: object) -> None:
        raise UserWarning

    monkeypatch.setattr(node, "MeetingHost", reached)
    monkeypatch.setattr(node, "Children", object)  # they would be pytest's
    argv = ["--gpus-per-node", "1", "--", "--run-dir", str(tmp_path), "--recipe", "demo"]
    if status is None:
        with pytest.raises(UserWarning):
            node.main(argv)
    else:
        assert node.main(argv) == status


def test_a_mistake_in_the_flags_ends_with_2_in_one_line(capsys: pytest.CaptureFixture[str]):
    assert node.main(["--gpus-per-node", "2", "--", "--tp", "3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--seq-length 64 is not divisible by --tensor-model-parallel-size 3" in line


DOCKERFILE = ROOT / "launch/docker/Dockerfile"
HADOLINT = PYTHON.with_name("hadolint")


def pip_lines() -> list[list[str]]:
    """The words of each `pip install` in it, continued lines joined."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    found = re.findall(r"pip install ((?:'[^']*'|[^&|;\n])*)", text)
    return [shlex.split(line) for line in found]


def test_versions_are_those_that_go_together():
    """Each pip line is constrained by requirements/gpu.txt, and repeats its versions where it names its packages."""
    constraints = dict(
        line.split("==") for line in (ROOT / "requirements/gpu.txt").read_text().splitlines() if "==" in line
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = pip_lines()
    assert len(lines) == 3
    for words in lines:
        assert words[:2] == ["-c", "requirements/gpu.txt"]
        for word in words[2:]:
            name, _, version = re.sub(r"\[.*\]", "", word).partition("==")
            assert constraints.get(name, version) == version or word.startswith("."), word
            if own := re.fullmatch(r"\.\[(.*)\]", word):
                assert set(own[1].split(",")) <= set(extras)
    # Builds of megavlm and Transformer Engine must use the installed torch.
    assert all("--no-build-isolation" in words for words in lines[1:])


@pytest.mark.skipif(not HADOLINT.exists(), reason=f"no {HADOLINT}: `make cloud-tools` installs it")
def test_the_linter_has_nothing_against_it():
    done = subprocess.run([str(HADOLINT), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
