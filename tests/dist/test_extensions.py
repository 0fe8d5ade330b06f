"""The extensions of `examples/`: a connector, a source, an objective and a family of a user's own, at layouts."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megavlm.programs import convert
from tests.support.covering import fast_and_slow
from tests.support.extensions import EXAMPLES, PACKAGES, POOLED, forget, install, train_with_examples
from tests.support.pool import Pools
from tests.support.training import LEAN, SMALL, THREE, assert_same_curve, metrics

ROOT = Path(__file__).parents[2]
SIZES = "--lr 1e-3 --lr-warmup-iters 2 --set model.projector.pixel_shuffle=1".split()
ARGV = [*SMALL[: SMALL.index("--images-per-sample")], *LEAN[len(SMALL) :], *SIZES]
DOTS = "--extension counting_dots --data dots --dots-most 5 --callback dots_log --dots-log-every 2".split()
LAYOUTS = {
    "tp2-pp2": (4, "--tp 2 --pp 2"),
    "tp2": (2, "--tp 2"),
    "pp2": (2, "--pp 2"),
    "tp2-colocated": (2, "--tp 2 --placement colocated --vision-tp 2"),
    "tp2-pp2-vpp2": (4, "--tp 2 --pp 2 --vpp 2"),
    "dp2": (2, ""),
    "pp2-colocated-full": (2, "--pp 2 --placement colocated --recompute-granularity full"),
    "tp2-no-sp-frozen": (2, "--tp 2 --no-sequence-parallel --freeze vision"),
}


@pytest.mark.parametrize("layout", fast_and_slow(["tp2"], LAYOUTS))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "flags"), [(4, "--tp 2 --pp 2 --vpp 2"), (2, ""), (2, "--tp 2 --placement colocated")]
)
def test_an_objective_gives_the_numbers_of_one_process(pools: Pools, tmp_path: Path, world: int, flags: str) -> None:
    argv = [*SMALL, *"--extension margin_loss --objective margin --margin-width 0.5".split()]
    argv += "--seq-length 80 --global-batch-size 8 --no-save".split() + THREE
    assert pools(1).run(train_with_examples, argv, str(tmp_path / "one")) == [None]
    assert set(pools(world).run(train_with_examples, [*argv, *flags.split()], str(tmp_path / "many"))) == {None}
    assert_same_curve(metrics(tmp_path / "many"), metrics(tmp_path / "one"))


@pytest.fixture
def acme(tmp_path: Path) -> tuple[Path, Path]:
    """A LLaVA's folder, and the same weights as a folder of `acme_vlm`."""
    import transformers

    from tests.support import hf
    from tests.support.tiny_models import TEXT, TOWER

    settings = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**TOWER),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=60,
        vision_feature_select_strategy="full",
    )
    llava = hf.save(transformers.LlavaForConditionalGeneration(settings), tmp_path / "llava")
    folder = tmp_path / "acme"
    runpy.run_path(str(EXAMPLES / "acme_vlm/small_model.py"))["as_acme"](llava, folder)
    return llava, folder


def test_a_family_of_an_extension_begins_with_its_folder_and_leaves_as_it_came(pools, acme, tmp_path, capsys):
    """At TP2·PP2 it has the numbers of a LLaVA with the same weights on one process."""
    from safetensors.torch import load_file

    llava, folder = acme
    argv = "--precision fp32 --train-iters 3 --global-batch-size 4 --seq-length 40 --lr 1e-3 --no-tensorboard".split()
    extension = ["--extension", "acme_vlm"]
    (line,) = pools(1).run(train_with_examples, [*argv, "--init-from", str(folder)], str(tmp_path / "unknown"))
    assert "model_type 'acme_vlm' is not supported" in line
    assert line.endswith("an --extension may add others")
    assert pools(1).run(train_with_examples, [*argv, "--init-from", str(llava)], str(tmp_path / "one")) == [None]
    many = [*argv, *extension, "--init-from", str(folder), "--tp", "2", "--pp", "2"]
    assert set(pools(4).run(train_with_examples, many, str(tmp_path / "many"))) == {None}
    assert_same_curve(metrics(tmp_path / "many"), metrics(tmp_path / "one"))

    assert convert.main(["export", str(tmp_path / "many"), str(tmp_path / "out")]) == 2
    assert "an --extension may add others" in capsys.readouterr().err
    install()
    try:
        assert convert.main(["export", str(tmp_path / "many"), str(tmp_path / "out"), *extension]) == 0
    finally:
        forget()
    given, trained = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "out"))
    assert {name: value.shape for name, value in trained.items()} == {name: each.shape for name, each in given.items()}
    same = {name for name in given if (trained[name] == given[name]).all()}
    assert {name.split(".")[0] for name in given.keys() - same} == {"encoder", "bridge", "decoder"}
    assert (tmp_path / "out/config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.slow
def test_the_examples_train_from_the_command_line(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), *(str(EXAMPLES / name) for name in PACKAGES)])
    argv = [*ARGV, *POOLED, *DOTS, *"--tp 2 --pp 2".split(), "--run-dir", str(tmp_path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "pretrain_vlm.py", *argv]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert metrics(tmp_path)[-1]["iteration"] == 4


def test_the_family_has_a_small_model_that_its_documented_command_trains(pools: Pools, tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLES / "acme_vlm/small_model.py"))["main"](folder := tmp_path / "acme")
    data = ["--datasets", str(EXAMPLES / "first_run/train.jsonl"), "--num-workers", "0", "--seq-length", "128"]
    argv = ["--extension", "acme_vlm", "--init-from", str(folder), *data, "--train-iters", "1", "--no-tensorboard"]
    assert pools(1).run(train_with_examples, argv, str(tmp_path / "run")) == [None]
