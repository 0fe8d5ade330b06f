"""Whatever a flag's value is, the program that runs at the end gets it as it was given, through a real bash."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import yaml
from torch.distributed.elastic.utils import macros

from megavlm.programs.launch import kubernetes
from megavlm.programs.launch.job import Command, Job, agent
from megavlm.programs.sweep.grid import Grid, variants_of
from megavlm.programs.sweep.training import flags_folder, write_flags
from tests.support.cloud import kubernetes_options

ROOT = Path(__file__).parents[4]
NASTY = (
    "", " ", "a b", "Instruct: find\nQuery: ", "\n$(touch ran) #", "`touch ran`", "$(touch ran)", "${HOME}",
    "$$", "$", "a$$b", "$$(HOME)", "x$(HOME)y$", "${local_rank}", "!!", "!1", "'", '"', "'; touch ran; '", "\\",
    "\\n", "a\\", "*", "~", "-n", "--", "--run-dir", "{a,b}", "a;b&c|d>e", "\t", "\r", "\x1b[31m", "é 漢字 🙂",
    "\u2028", "%j", "a=b", "#", "\x7f",
)  # fmt: skip


def received(script: str, folder: Path, **environment: str) -> list[list[str]]:
    """Run a script by bash, in which `python` writes down its words; return those of each call."""
    bin_ = folder / "bin"
    bin_.mkdir(exist_ok=True)
    programs = {
        "python": f"printf '%s\\0' \"$@\" >>{folder}/got; printf '\\0END\\0' >>{folder}/got",
        "srun": 'while [ "${1:0:2}" = -- ]; do shift; done; exec "$@"',
        "scontrol": "echo host",
    }
    for name, body in programs.items():
        (bin_ / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (bin_ / name).chmod(0o755)
    path = f"{bin_}:{os.environ['PATH']}"
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
            **{"SLURM_JOB_ID": "1", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "host", "SLURM_NODEID": "0"},
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
