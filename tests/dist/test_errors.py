"""What a user sees of a mistake: one line, once, on every rank exit status 2, and no waiting."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megavlm.checkpoint import folders
from megavlm.checkpoint.manifest import write_manifest
from megavlm.resilience.events import events, read_status
from tests.support.forked import PATIENCE, ROOT, start_program, status_of
from tests.support.manifests import write_sums
from tests.support.pool import Pools
from tests.support.torchrun import TINY
from tests.support.training import LEAN, SHALLOW, train
from tests.support.user_callbacks import train_to_error


def program(*argv: str, output: Path) -> tuple[int | None, str]:
    """Exit status and output of the training program."""
    return status_of(start_program(argv, output)), output.read_text()


def lines_of_ours(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("pretrain_vlm.py: ")]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--tenser-model-parallel-size", "2"], "--tensor-model-parallel-size"),
        (["--tp", "2"], "--nproc-per-node"),
        (["--pp", "20", "--gbs", "20", "--dry-run"], "--pp"),
        (["--load", "nowhere", "--run-dir", "{tmp}/run"], "--load"),
        (["--run-dir", "/proc/nowhere"], "--run-dir"),
    ],
)
def test_one_line_and_status_2(tmp_path: Path, argv: list[str], named: str):
    status, output = program(*(word.replace("{tmp}", str(tmp_path)) for word in argv), output=tmp_path / "output")
    assert status == 2, output
    (line,) = lines_of_ours(output)
    assert named in line
    assert "Traceback" not in output


def test_bad_numbers_end_with_status_3(tmp_path: Path):
    explodes = (
        "--train-iters 30 --lr 1e30 --clip-grad 0 --lr-warmup-iters 0 --set numerics.max_consecutive_skips=2 --no-save"
    ).split()
    run_dir = tmp_path / "run"
    status, output = program(*LEAN, *explodes, "--run-dir", str(run_dir), output=tmp_path / "output")
    assert status == 3, output
    (line,) = lines_of_ours(output)
    assert "this is bad step 2 in a row (numerics.max_consecutive_skips)" in line
    assert "Traceback" not in output
    told = read_status(run_dir)
    assert told["state"] == "failed"
    assert told["reason"] in line


def test_every_rank_ends_with_status_2_and_one_speaks():
    """As a user starts it. A rank that waited for the others would wait for --distributed-timeout-minutes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "pretrain_vlm.py", "--tp", "2", "--pp", "2"]
    command += ["--distributed-timeout-minutes", "600"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    (line,) = lines_of_ours(output)
    assert line in output.rpartition("Root Cause")[2], output  # torchrun's report ends with it
    assert len(re.findall(r"exitcode +: 2 ", output)) == 2, output


@pytest.fixture(scope="module")
def finished(run_once) -> Path:
    """A finished run of one process with a checkpoint at iteration 8."""
    return run_once(1, SHALLOW)


def resume(run_dir: Path, *argv: str) -> tuple[int | None, str]:
    return program(*SHALLOW, "--train-iters", "10", *argv, "--run-dir", str(run_dir), output=run_dir / "output")


def copy_of(finished: Path, tmp_path: Path) -> tuple[Path, Path]:
    import shutil

    shutil.copytree(finished, tmp_path / "run")
    checkpoint = folders.newest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    return tmp_path / "run", checkpoint


def test_checkpoint_of_another_model_is_refused(finished: Path, tmp_path: Path):
    run_dir, _ = copy_of(finished, tmp_path)
    status, output = resume(run_dir, "--set", "model.language.hidden_size=64")
    assert status == 2, output
    (line,) = lines_of_ours(output)
    assert "language.hidden_size" in line


def test_checkpoint_of_a_newer_format_is_refused(finished: Path, tmp_path: Path):
    run_dir, checkpoint = copy_of(finished, tmp_path)
    summary = json.loads((checkpoint / "megavlm.json").read_text())
    (checkpoint / "megavlm.json").write_text(json.dumps(summary | {"format": 99}))
    write_manifest(checkpoint, {})
    status, output = resume(run_dir)
    assert status == 2, output
    assert "99" in lines_of_ours(output)[0]


class Opens:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_a_checkpoint_with_pickles_that_run_code_runs_none(finished: Path, tmp_path: Path):
    """What torch and megatron-core unpickle is there for them: megavlm does not read it."""
    run_dir, checkpoint = copy_of(finished, tmp_path)
    proof = tmp_path / "executed"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Opens(proof)))
    torch.save({"state": Opens(proof)}, checkpoint / "common.pt")
    tensors, named = checkpoint / "__0_0.distcp", b"ctorch._utils\n_rebuild_tensor_v2"
    assert named in tensors.read_bytes()
    code = b"cos\nsystem\n".ljust(len(named), b"#")
    tensors.write_bytes(tensors.read_bytes().replace(named, code))
    write_sums(checkpoint)
    status, output = resume(run_dir)
    assert status == 0, output
    assert not proof.exists()


def apart(argv: list[str], folder: str) -> tuple[str, str] | None:
    """Train in a folder of this rank's own, as on a disk that the other nodes do not see; return the user's error."""
    import torch.distributed as dist

    from megavlm.train import run_dir

    with patch.dict(run_dir.check_shared.__kwdefaults__, patience=0.5):
        return train_to_error(argv, f"{folder}/{dist.get_rank()}")


def test_a_run_folder_that_ranks_do_not_share_is_refused_by_all(pools, tmp_path: Path):
    told = pools(2).run(apart, [*LEAN, "--tp", "2"], str(tmp_path))
    assert all("is not the same folder on" in each for _, each in told), told
    assert not list(tmp_path.glob("0/shared-*"))


def train_until_full(argv: list[str], run_dir: str) -> str:
    """The second step finds no memory; returns the line that ends the run."""
    import torch

    from megavlm.errors import UserError
    from megavlm.train.engine import Engine

    original, steps = Engine.train_step, []

    def step(engine: Engine, *args, **kwargs):
        steps.append(1)
        if len(steps) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(engine, *args, **kwargs)

    with patch.object(Engine, "train_step", step), pytest.raises(UserError) as raised:
        train(argv, run_dir)
    return str(raised.value)


def test_out_of_memory_is_one_line_with_components_and_a_remedy(pools: Pools, tmp_path: Path):
    (line,) = pools(1).run(train_until_full, [*TINY, *"--micro-batch-size 4 --no-save".split()], str(tmp_path))
    assert line.startswith("out of memory on rank 0: the planner estimates a peak of")
    assert "weights" in line
    assert "activations" in line
    assert ": use --micro-batch-size" in line
    assert "\n" not in line
    assert [each["reason"] for each in events(tmp_path) if each["kind"] == "failure"] == [line]
