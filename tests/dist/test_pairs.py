"""Files of pairs: any layout trains on them alike, resumes, and finds held-out documents equally well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.covering import slow
from tests.support.data_files import write_pairs, write_tokenizer
from tests.support.float64 import train_in_float64
from tests.support.pool import Pools
from tests.support.training import LEAN, assert_same_curve, metrics, train

SCORES = ("loss", "recall_at_1", "recall_at_5", "recall_at_10", "ndcg_at_10", "mrr")


@pytest.fixture(scope="module")
def argv(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pairs")
    write_tokenizer(folder / "tokenizer")
    train_file = write_pairs(folder, records=60)
    held_out = write_pairs(folder, records=17, seed=3, name="held.jsonl")
    without_size = [word for word in LEAN if not word.startswith("model.language.vocab_size=")]
    return [
        *without_size,
        *"--images-per-sample 1 --image-sizes --seq-length 96 --packing-window 16 --num-workers 0".split(),
        *f"--objective contrastive --temperature 0.2 --datasets {train_file},image_root={folder / 'images'}".split(),
        *f"--validation {held_out},image_root={folder / 'images'} --eval-interval 2".split(),
        *f"--tokenizer {folder / 'tokenizer'} --query-prefix find --document-prefix see".split(),
    ]


@pytest.fixture(scope="module")
def alone(run_once, argv: list[str]):
    return metrics(run_once(1, [*argv, "--no-save"]))


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, ""),
        slow(2, "--tp 2 --num-workers 1"),
        slow(4, "--tp 2 --num-workers 1"),
        slow(2, "--pp 2 --vpp 2 --placement colocated"),
        slow(2, "--cp 2 --no-packing"),
        slow(4, "--tp 2 --pp 2"),
        slow(2, "--data-parallel-sharding full"),
    ],
)
def test_layouts_train_and_score_alike(pools: Pools, argv, alone, tmp_path: Path, world: int, layout: str):
    expected, run, tolerance = alone, train, 1e-5
    if "--no-packing" in layout:  # rows of one text each: in fp32 gradient norms of two layouts are 2e-5 apart
        run, tolerance, window = train_in_float64, 1e-11, argv.index("--packing-window")
        argv = [*argv[:window], *argv[window + 2 :], "--data-parallel-sharding", "none"]
        pools(1).run(run, [*argv, "--no-save", "--no-packing"], str(tmp_path / "alone"))
        expected = metrics(tmp_path / "alone")
    pools(world).run(run, [*argv, "--no-save", *layout.split()], str(tmp_path / "many"))
    found = metrics(tmp_path / "many")
    assert_same_curve(found, expected, tolerance=tolerance)
    for mine, theirs in zip(found[1::2], expected[1::2], strict=True):
        scores = {name: mine[f"validation/{name}"] for name in SCORES}
        assert scores == pytest.approx({name: theirs[f"validation/{name}"] for name in SCORES}, rel=1e-5)
        assert mine["validation/pairs"] == theirs["validation/pairs"] == 23
        assert 0 < scores["mrr"] < 1


@pytest.mark.slow
def test_a_run_on_pairs_resumes_where_it_stopped(pools: Pools, argv, alone, tmp_path: Path):
    pools(2).run(train, [*argv, "--train-iters", "2", "--tp", "2"], str(tmp_path))
    pools(2).run(train, [*argv, "--pp", "2"], str(tmp_path))
    assert_same_curve(metrics(tmp_path), alone)
