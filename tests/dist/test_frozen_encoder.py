"""A frozen, colocated encoder: encoding ahead changes no bit, features from disk no digit that counts."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megavlm.pipeline.encoder import EncoderRunner
from megavlm.pipeline.feature_cache import FeatureCache
from tests.support.covering import slow
from tests.support.flags import HALF, MODELS
from tests.support.pool import Pools
from tests.support.training import LEAN, SMALL, assert_same_curve, metrics, started, train, without_wall_time

# Weights begin larger: features of other sounds would not show.
FROZEN = [*LEAN, *MODELS["audio"].split(), *"--init-method-std 0.2 --pp 2".split()]
FROZEN += "--placement colocated --freeze vision audio projector".split()


@pytest.fixture(scope="module")
def plain(run_once) -> Path:
    return run_once(2, [*FROZEN, "--no-save"])


def test_encoding_ahead_changes_no_bit_even_across_a_stop(pools: Pools, plain: Path, tmp_path: Path):
    pools(2).run(train, [*FROZEN, *HALF, "--encode-ahead"], str(tmp_path))
    pools(2).run(train, [*FROZEN, "--encode-ahead"], str(tmp_path))
    assert without_wall_time(metrics(tmp_path)) == without_wall_time(metrics(plain))


def train_without_encoder(argv: list[str], run_dir: str) -> None:
    """Fails where the encoder runs."""
    with patch.object(EncoderRunner, "_run", None):
        train(argv, run_dir)


@pytest.mark.parametrize(("world", "layout"), [(2, ""), slow(2, "--vision-tp 2"), slow(4, "--cp 2")])
def test_features_come_from_disk_once_they_are_there(pools, plain, tmp_path, world, layout):
    argv = [*FROZEN, "--no-save", "--vision-cache", str(tmp_path / "cache"), *layout.split()]
    pools(world).run(train, argv, str(tmp_path / "first"))
    pools(world).run(train_without_encoder, argv, str(tmp_path / "second"))
    for run in ("first", "second"):
        assert_same_curve(metrics(tmp_path / run), metrics(plain))
    flops = [np.array(flops_of(run)) for run in (plain, tmp_path / "first", tmp_path / "second")]
    assert flops[1] * world == pytest.approx(flops[0] * 2), "each image was encoded once"
    assert (flops[2] < 0.99 * flops[1]).all(), "an encoder that does not run counts nothing"


def flops_of(run: Path) -> list[float]:
    """TFLOPs of a device in each step."""
    return [row["model_tflops_per_device"] * row["step_time_s"] for row in metrics(run)]


def train_with_files_that_vanish(argv: list[str], run_dir: str) -> None:
    """Train where rank 1 misses every third file of the cache, as if another run had deleted it."""
    get, asked = FeatureCache.get, 0

    def vanishing(self, key):
        nonlocal asked
        asked += 1
        return None if dist.get_rank() == 1 and asked % 3 == 0 else get(self, key)

    with patch.object(FeatureCache, "get", vanishing):
        train(argv, run_dir)


def test_ranks_of_an_encoder_run_it_together_where_one_finds_no_file(pools: Pools, plain: Path, tmp_path: Path):
    argv = [*FROZEN, *"--no-save --vision-tp 2 --vision-cache".split(), str(tmp_path / "cache")]
    pools(2).run(train, argv, str(tmp_path / "first"))
    pools(2).run(train_with_files_that_vanish, argv, str(tmp_path / "second"))
    assert_same_curve(metrics(tmp_path / "second"), metrics(plain))


def largest_difference(argv: list[str], run_dir: str) -> tuple[int, float]:
    """(parameters that both ranks have whole, how far they are apart after three steps)."""
    with started(argv, run_dir) as run:
        for _ in range(3):
            run.engine.train_step(run.data_loader.next_step().batches)
        apart = []
        for param in run.engine.model_chunks[-1].parameters():
            if not getattr(param, "tensor_model_parallel", False):
                both = [torch.empty_like(param) for _ in range(2)]
                dist.all_gather(both, param.detach())
                apart.append(float((both[0] - both[1]).abs().max()))
    return len(apart), max(apart)


def test_dropout_keeps_the_ranks_of_an_encoder_alike(pools: Pools, tmp_path: Path) -> None:
    """Without sequence parallelism every rank drops the same of whole activations, and its own share of the heads'."""
    flags = "--no-save --pp 2 --placement colocated --vision-tp 2 --no-sequence-parallel"
    argv = [*SMALL, *flags.split(), *"--hidden-dropout 0.2 --attention-dropout 0.2".split()]
    for whole, difference in pools(2).run(largest_difference, argv, str(tmp_path)):
        assert whole > 20
        assert difference == 0
