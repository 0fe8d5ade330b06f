"""A frozen, colocated encoder: encoding ahead changes no bit, features from disk no digit that counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.pool import Pools
from tests.dist.test_resume import HALF
from tests.dist.training import SMALL, assert_same_curve, metrics, train, without_wall_time

FROZEN = [*SMALL, *"--placement colocated --freeze vision projector --pp 2".split()]


@pytest.fixture(scope="module")
def plain(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("plain")
    pools(2).run(train, [*FROZEN, "--no-save"], str(run_dir))
    return run_dir


def test_encoding_ahead_changes_no_bit_even_across_a_stop(pools: Pools, plain: Path, tmp_path: Path):
    pools(2).run(train, [*FROZEN, *HALF, "--encode-ahead"], str(tmp_path))
    pools(2).run(train, [*FROZEN, "--encode-ahead"], str(tmp_path))
    assert without_wall_time(metrics(tmp_path)) == without_wall_time(metrics(plain))


def train_without_encoder(argv: list[str], run_dir: str) -> None:
    """Fails where the encoder runs."""
    from megavlm.pipeline.encoder import Encoder

    run = Encoder._run
    Encoder._run = None  # type: ignore[assignment,method-assign]
    try:
        train(argv, run_dir)
    finally:
        Encoder._run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("encoder", ["", "--vision-tp 2"])
def test_features_come_from_disk_once_they_are_there(pools: Pools, plain: Path, tmp_path: Path, encoder: str):
    argv = [*FROZEN, "--no-save", "--vision-cache", str(tmp_path / "cache"), *encoder.split()]
    pools(2).run(train, argv, str(tmp_path / "first"))
    pools(2).run(train_without_encoder, argv, str(tmp_path / "second"))
    for run in ("first", "second"):
        assert_same_curve(metrics(tmp_path / run), metrics(plain))
