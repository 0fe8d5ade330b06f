"""The example `examples/arr_coc`: photos as thirteen channels, and tokens where they are relevant, at any layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from megavlm.checkpoint.hf.checkpoint_reader import CheckpointReader
from tests.support import extensions
from tests.support.covering import fast_and_slow
from tests.support.data_files import write_tokenizer
from tests.support.pool import Pools
from tests.support.processors import picture
from tests.support.training import SMALL, assert_same_curve, metrics, without_wall_time

# Images of 4 × 4 patches: four regions of one to four tokens, nine together.
FLAGS = (
    "--extension arr_coc --vision-input texture --set model.vision.in_channels=13 --projector-kind arr_coc --set "
    "model.projector.connectors.arr_coc.budget=9 model.projector.connectors.arr_coc.fewest=1 "
    "model.projector.connectors.arr_coc.most=4 model.projector.connectors.arr_coc.regions=2 "
    "model.projector.connectors.arr_coc.scorer_size=12 --set model.projector.connectors.arr_coc.queries=3 "
    "model.projector.connectors.arr_coc.hidden_size=24 --seq-length 64 --packing-window 8 --num-workers 0 --set "
    "model.vision.image_size=32 --lr 1e-3"
).split()
LAYOUTS = {
    "tp2-pp2-vpp2": (4, "--tp 2 --pp 2 --vpp 2"),
    "tp2": (2, "--tp 2"),
    "pp2": (2, "--pp 2"),
    "tp2-pp2": (4, "--tp 2 --pp 2"),
    "dp2": (2, ""),
    "tp2-colocated": (2, "--tp 2 --placement colocated --vision-tp 2"),
    "zero3": (2, "--data-parallel-sharding full"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("arr_coc")
    lines = []
    for number in range(16):
        Image.fromarray(picture(40, 30, seed=number)).save(root / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": f"A {number} and two."}]
        lines.append(json.dumps({"image": f"{number}.png", "conversations": turns}))
    (root / "train.jsonl").write_text("\n".join(lines))
    return ["--datasets", str(root / "train.jsonl"), "--tokenizer", str(write_tokenizer(root))]


def argv_of(data: Sequence[str]) -> list[str]:
    kept = SMALL[: SMALL.index("--images-per-sample")]
    return [*kept, *FLAGS, *data, "--set", "model.projector.pixel_shuffle=1"]


@pytest.fixture(scope="module")
def whole(run_once, data: list[str]) -> Path:
    return run_once(1, argv_of(data), extensions.train_with_examples)


@pytest.mark.slow
@pytest.mark.parametrize("layout", fast_and_slow(["tp2"], LAYOUTS))
def test_every_layout_gives_the_numbers_of_one_process(pools, data, whole, tmp_path, layout):
    world, flags = LAYOUTS[layout]
    argv = [*argv_of(data), *flags.split(), "--no-save"]
    assert set(pools(world).run(extensions.train_with_examples, argv, str(tmp_path))) == {None}
    assert_same_curve(metrics(tmp_path), metrics(whole))


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_and_on_another_layout(pools, data, whole, tmp_path):
    for world, flags in ((1, []), (2, ["--tp", "2"])):
        folder, argv = str(tmp_path / str(world)), argv_of(data)
        assert pools(1).run(extensions.train_with_examples, [*argv, "--train-iters", "2"], folder) == [None]
        assert set(pools(world).run(extensions.train_with_examples, [*argv, *flags], folder)) == {None}
        assert_same_curve(metrics(tmp_path / str(world)), metrics(whole))
    assert without_wall_time(metrics(tmp_path / "1")) == without_wall_time(metrics(whole))


@pytest.mark.slow
def test_scorers_are_trained(pools: Pools, data: list[str], tmp_path: Path) -> None:
    """Without weight decay, weights change where gradients reach them."""
    argv = [*argv_of(data), *"--weight-decay 0 --train-iters 2 --save-interval 1".split()]
    assert pools(1).run(extensions.train_with_examples, argv, str(tmp_path)) == [None]
    first, second = (CheckpointReader(tmp_path / f"checkpoints/iter_{step:07}") for step in (1, 2))
    for name in ("information", "information_out", "salience", "salience_out", "queries"):
        key = f"projector.{name}.weight"
        rows = first.stored[key].shape[0]
        assert not torch.equal(first.read(key, 0, rows), second.read(key, 0, rows)), name


@pytest.mark.slow
def test_a_budget_that_regions_cannot_share_is_refused(pools: Pools, data: list[str], tmp_path: Path) -> None:
    argv = [*argv_of(data), "--set", "model.projector.connectors.arr_coc.budget=17"]
    (line,) = pools(1).run(extensions.train_with_examples, argv, str(tmp_path))
    assert (
        "model.projector.connectors.arr_coc.budget 17 cannot be shared by 4 regions of 1 to 4 tokens: set it "
        "between 4 and 16" in line
    )
