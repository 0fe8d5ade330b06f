"""The training program on one GPU: it ends, resumes, passes batches without images, and takes the memory predicted."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import model
from tests.gpu.model import require_fp8
from tests.support.training import TEXT_TO_LEARN, assert_within_a_hundredth, metrics, train

ROOT = Path(__file__).parents[2]
STEPS = 6


def run_program(run_dir: Path, *flags: str) -> None:
    command = [sys.executable, "pretrain_vlm.py", *model.MODEL, "--precision", "bf16", *flags]
    done = subprocess.run(
        [*command, "--run-dir", str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_run_ends_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    """The first loss after resuming needs the weights of the checkpoint alone, and forward passes repeat bit for bit.

    Some backward kernels add in no fixed order, so that later iterations agree to rounding only.
    """
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = f"--train-iters {STEPS} --global-batch-size 4 --save-interval 3 --keep-checkpoints 0".split()
    run_program(whole, *flags)
    records = metrics(whole)
    assert len(records) == STEPS
    assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in records)

    shutil.copytree(whole / "checkpoints" / "iter_0000003", resumed / "checkpoints" / "iter_0000003")
    run_program(resumed, *flags)
    later = metrics(resumed)
    assert [record["iteration"] for record in later] == [4, 5, 6]
    assert later[0]["loss"] == records[3]["loss"]
    for again, before in zip(later, records[3:], strict=True):
        assert again["loss"] == pytest.approx(before["loss"], rel=1e-3)
        assert again["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-2)
        assert again["tokens"] == before["tokens"]


def test_weights_kept_in_fp8_train_alike_and_a_run_without_them_goes_on(
    world: Any, transformer_engine: Any, tmp_path: Path
) -> None:
    """The same numbers are multiplied; what master weights are rounded to may differ by where that happens."""
    require_fp8(world)
    wide, kept, resumed = tmp_path / "wide", tmp_path / "kept", tmp_path / "resumed"
    flags = f"--train-iters {STEPS} --global-batch-size 4 --save-interval 3 --keep-checkpoints 0 --fp8 hybrid".split()
    run_program(wide, *flags)
    run_program(kept, *flags, "--fp8-param-gather")
    shutil.copytree(kept / "checkpoints" / "iter_0000003", resumed / "checkpoints" / "iter_0000003")
    run_program(resumed, *flags)
    for ours, theirs in ((metrics(kept), metrics(wide)), (metrics(resumed), metrics(kept)[3:])):
        assert [record["iteration"] for record in ours] == [record["iteration"] for record in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-2)


def test_batches_without_images_pass(tmp_path: Path) -> None:
    run_program(tmp_path, "--train-iters", "3", "--set", "data.imageless_share=1.0", "--no-save")
    assert [record["images"] for record in metrics(tmp_path)] == [0, 0, 0]


def test_fp8_loss_is_within_a_hundredth_of_bf16s(world: Any, transformer_engine: Any, tmp_path: Path) -> None:
    require_fp8(world)
    for precision in ("none", "hybrid"):
        train([*TEXT_TO_LEARN, "--fp8", precision], str(tmp_path / precision))
    assert_within_a_hundredth(metrics(tmp_path / "hybrid"), metrics(tmp_path / "none"))


def test_peak_memory_is_as_predicted(world: Any) -> None:
    """A step of some gigabytes (on a CPU, of megabytes), against the planner's count."""
    from megavlm.arch.dims import dims_of
    from megavlm.planner.auto import memory_of
    from tests.support.live_bytes import step_peak

    scale = 1 if world.is_cpu else 16
    flags = (
        f"--precision bf16 --seq-length {256 * scale} --images-per-sample 2 --image-sizes 64 --set "
        f"model.vision.num_layers=4 model.language.hidden_size={128 * scale} "
        f"model.language.ffn_hidden_size={320 * scale} model.language.num_layers=6 "
        f"model.language.num_attention_heads={2 * scale} model.language.num_query_groups={scale} "
        f"model.language.vocab_size={1024 * scale}"
    ).split()
    config = model.config_of(flags)
    from megavlm.data.collate import CollateSpec, collate
    from megavlm.data.synthetic import SyntheticSource

    source = SyntheticSource(config)
    batch = collate([[source.sample(0)]], CollateSpec.of(config, source))
    engine = model.engine_of(config, world)
    (memory,) = memory_of(config, dims_of(config, world=1), on_gpu=not world.is_cpu)
    if world.is_cpu:
        peak = step_peak(engine, [batch])
    else:
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            engine.train_step([batch])
        peak = torch.cuda.max_memory_allocated()
    engine.close()
    assert memory.total == pytest.approx(peak, rel=0.1), f"predicted {memory.total / peak:.3f} of {peak} bytes"


def test_a_run_reports_its_share_of_the_peak(world: Any, tmp_path: Path) -> None:
    from megavlm.planner.hardware import peaks_of

    if peaks_of(world.name) is None:
        pytest.skip(f"the peak of {world.name} is not known")
    train([*model.MODEL, "--train-iters", "3", "--precision", "bf16", "--no-save"], str(tmp_path))
    shares = [record["mfu"] for record in metrics(tmp_path)]
    assert all(share is not None and 0 < share < 1 for share in shares)
