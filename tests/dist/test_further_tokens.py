"""Layers that predict further tokens: files in and out at layouts, and a run that resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megavlm.backend import activate
from tests.support.flags import DROPOUT, FOUR, MODELS, TWO
from tests.support.pool import Pools
from tests.support.training import SMALL, assert_resumed, assert_same_curve, metrics, train, train_composed

activate()  # before the modules below import megatron-core

from megavlm.programs import convert  # noqa: E402
from tests.support import hf  # noqa: E402
from tests.support.predictors import with_predictor  # noqa: E402
from tests.support.tiny_models import tiny  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe", "glm4v-moe"])
def test_exports_are_byte_equal(pools: Pools, tmp_path: Path, family: str) -> None:
    """A run that changes nothing gives back the folder that it began with, with the layer and without it."""
    folder = hf.save(with_predictor(tiny(family)), tmp_path / "hf")
    argv = (
        f"--init-from {folder} --global-batch-size 4 --micro-batch-size 1 --seq-length {hf.LENGTH} --lr-warmup-iters 0 "
        "--lr-decay-style constant --no-tensorboard --precision fp32 --image-sizes 16 --train-iters 1 --lr 1e-30"
    ).split()
    depths = "--set model.language.mtp_layers=1"
    layouts = [f"--tp 2 {depths}", f"--pp 2 --vpp 2 {depths}", f"--cp 2 {depths}"]
    if family != "glm4v-moe":  # whose names tell the layer by the number of layers of published models
        layouts.append("--tp 2")
    for number, flags in enumerate(layouts):
        run, out = str(tmp_path / f"run{number}"), tmp_path / f"out{number}"
        pools(2).run(train_composed, [*argv, *flags.split()], run)
        assert ("mtp_loss" in metrics(run)[0]) == (depths in flags)
        assert convert.main(["export", run, str(out)]) == 0
        assert hf.different(folder, out) == []


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_on_other_layouts(pools: Pools, one_process, tmp_path: Path) -> None:
    argv = [*SMALL, *MODELS["mtp"].split(), *DROPOUT, *"--tp 2 --pp 2".split()]
    pools(4).run(train, [*argv, *FOUR, "--no-save"], str(tmp_path / "whole"))
    pools(4).run(train, [*argv, *TWO], str(tmp_path / "halves"))
    pools(4).run(train, [*argv, *FOUR], str(tmp_path / "halves"))
    assert_resumed(metrics(tmp_path / "halves"), metrics(tmp_path / "whole"))
    layouts = ((4, "--pp 4"), (2, "--tp 2"), (1, ""), (4, "--cp 2 --tp 2"), (2, "--data-parallel-sharding full"))
    for number, (world, layout) in enumerate(layouts):
        steps = ["--train-iters", str(number + 2)]
        pools(world).run(train, [*SMALL, *MODELS["mtp"].split(), *layout.split(), *steps], str(tmp_path / "moved"))
    assert_same_curve(metrics(tmp_path / "moved"), one_process("mtp", ["--train-iters", "6"]))
