"""The extensions of `examples/`: a connector and a source of samples of a user's own, at layouts and resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.extensions import EXAMPLES, PACKAGES, POOLED, train_with_examples
from tests.support.pool import Pools
from tests.support.training import SMALL, assert_same_curve, metrics

ROOT = Path(__file__).parents[2]
SIZES = "--lr 1e-3 --lr-warmup-iters 2 --projector-pixel-shuffle 1".split()
ARGV = [*SMALL[: SMALL.index("--images-per-sample")], *SIZES]
DOTS = "--extension counting_dots --data dots --dots-most 5 --callback dots_log --dots-log-every 2".split()
LAYOUTS = {
    "tp2-pp2": (4, "--tp 2 --pp 2"),
    "tp2-colocated": (2, "--tp 2 --placement colocated --vision-tp 2"),
    "tp2-pp2-vpp2": (4, "--tp 2 --pp 2 --vpp 2"),
    "dp2": (2, ""),
    "pp2-colocated-full": (2, "--pp 2 --placement colocated --recompute-granularity full"),
    "tp2-no-sp-frozen": (2, "--tp 2 --no-sequence-parallel --freeze vision"),
}


@pytest.mark.parametrize(
    "layout", [name if name == "tp2-pp2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_an_extension_gives_the_numbers_of_one_process(pools: Pools, tmp_path: Path, layout: str) -> None:
    world, flags = LAYOUTS[layout]
    frozen = "--freeze vision".split() if "frozen" in layout else []
    argv = [*ARGV, *POOLED, *DOTS, *frozen]
    assert pools(1).run(train_with_examples, argv, str(tmp_path / "one")) == [None]
    assert set(pools(world).run(train_with_examples, [*argv, *flags.split()], str(tmp_path / "many"))) == {None}
    assert_same_curve(metrics(tmp_path / "many"), metrics(tmp_path / "one"))
    assert [line.split()[0] for line in (tmp_path / "many/dots.log").read_text().splitlines()] == ["2", "4"]
    if layout != "tp2-pp2":
        return
    # The checkpoint of four ranks goes on in one process, which needs the extension again.
    longer = [*ARGV, "--train-iters", "6"]
    (line,) = pools(1).run(train_with_examples, longer, str(tmp_path / "many"))
    assert line.endswith("was made with --extension pooled_attention counting_dots: add that to go on")
    for folder, world in (("many", 1), ("one", 4)):
        more = [*longer, *POOLED, *DOTS, *(flags.split() if world == 4 else [])]
        assert set(pools(world).run(train_with_examples, more, str(tmp_path / folder))) == {None}
    assert_same_curve(metrics(tmp_path / "many"), metrics(tmp_path / "one"))


@pytest.mark.parametrize(
    "flags", ["--tp 2 --pp 2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("--tp 2 --pp 2 --vpp 2", ""))]
)
def test_an_objective_gives_the_numbers_of_one_process(pools: Pools, tmp_path: Path, flags: str) -> None:
    argv = [*SMALL, *"--extension margin_loss --objective margin --margin-width 0.5".split()]
    argv += "--seq-length 80 --global-batch-size 8 --no-save".split()
    assert pools(1).run(train_with_examples, argv, str(tmp_path / "one")) == [None]
    world = 4 if flags else 2
    assert set(pools(world).run(train_with_examples, [*argv, *flags.split()], str(tmp_path / "many"))) == {None}
    assert_same_curve(metrics(tmp_path / "many"), metrics(tmp_path / "one"))


@pytest.mark.slow
def test_the_examples_train_from_the_command_line(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), *(str(EXAMPLES / name) for name in PACKAGES)])
    argv = [*ARGV, *POOLED, *DOTS, *"--tp 2 --pp 2".split(), "--run-dir", str(tmp_path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "pretrain_vlm.py", *argv]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert metrics(tmp_path)[-1]["iteration"] == 4
