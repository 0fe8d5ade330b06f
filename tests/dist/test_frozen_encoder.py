"""A frozen, colocated encoder: encoding ahead changes no bit, features from disk no digit that counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flags import HALF
from tests.support.pool import Pools
from tests.support.training import SMALL, assert_same_curve, metrics, train, without_wall_time

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
    from megavlm.pipeline.encoder import EncoderRunner

    run = EncoderRunner._run
    EncoderRunner._run = None  # type: ignore[assignment,method-assign]
    try:
        train(argv, run_dir)
    finally:
        EncoderRunner._run = run  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, ""), (2, "--vision-tp 2"), pytest.param(4, "--cp 2", marks=pytest.mark.slow)],
)
def test_features_come_from_disk_once_they_are_there(
    pools: Pools, plain: Path, tmp_path: Path, world: int, layout: str
):
    argv = [*FROZEN, "--no-save", "--vision-cache", str(tmp_path / "cache"), *layout.split()]
    pools(world).run(train, argv, str(tmp_path / "first"))
    pools(world).run(train_without_encoder, argv, str(tmp_path / "second"))
    for run in ("first", "second"):
        assert_same_curve(metrics(tmp_path / run), metrics(plain))


def train_with_files_that_vanish(argv: list[str], run_dir: str) -> None:
    """Train where rank 1 misses every third file of the cache, as if another run had deleted it."""
    import torch.distributed as dist

    from megavlm.pipeline.feature_cache import FeatureCache

    get, asked = FeatureCache.get, 0

    def vanishing(self, key):
        nonlocal asked
        asked += 1
        return None if dist.get_rank() == 1 and asked % 3 == 0 else get(self, key)

    FeatureCache.get = vanishing  # type: ignore[method-assign]
    try:
        train(argv, run_dir)
    finally:
        FeatureCache.get = get  # type: ignore[method-assign]


def test_ranks_of_an_encoder_run_it_together_where_one_finds_no_file(pools: Pools, plain: Path, tmp_path: Path):
    argv = [*FROZEN, *"--no-save --vision-tp 2 --vision-cache".split(), str(tmp_path / "cache")]
    pools(2).run(train, argv, str(tmp_path / "first"))
    pools(2).run(train_with_files_that_vanish, argv, str(tmp_path / "second"))
    assert_same_curve(metrics(tmp_path / "second"), metrics(plain))


class _Fp8:
    """Transformer Engine's switch (`FP8GlobalStateManager.FP8_ENABLED`) is a class's attribute, so of the process."""

    enabled = False


def train_in_regions(argv: list[str], run_dir: str) -> tuple[int, list[str]]:
    """(layers of the vision tower that ran while language layers had the switch on, in what order things were queued).

    "begin", "work" and "end" are asked of the stream beside, "L" is a language layer, "V" a vision layer.
    """
    import time
    from contextlib import contextmanager

    from megavlm.arch.layers import VISION_LAYER, kind_of
    from megavlm.model.vlm import VLMChunk
    from megavlm.pipeline import colocated

    inside, order = [], []
    run_layer, side_stream = VLMChunk.run_transformer_layer, colocated.side_stream

    class Noted:
        def fork(self):
            order.append("begin")

        @contextmanager
        def run(self, inputs):
            order.append("work")
            assert all(each.dim() == 2 for each in inputs)
            yield
            order.append("done")

        def join(self, outputs):
            order.append("end")

    def within(self, name, hidden, **kwargs):
        if kind_of(name) == VISION_LAYER:
            order.append("V")
            inside.append(_Fp8.enabled)
            time.sleep(0.001)  # lets others run
            inside.append(_Fp8.enabled)
            return run_layer(self, name, hidden, **kwargs)
        order.append("L")
        before, _Fp8.enabled = _Fp8.enabled, True
        try:
            time.sleep(0.002)
            return run_layer(self, name, hidden, **kwargs)
        finally:
            _Fp8.enabled = before

    VLMChunk.run_transformer_layer, colocated.side_stream = within, lambda device: Noted()
    try:
        train(argv, run_dir)
    finally:
        VLMChunk.run_transformer_layer, colocated.side_stream = run_layer, side_stream
    return sum(inside), order


def test_passes_ahead_are_queued_between_micro_batches_and_outside_fp8_regions(pools: Pools, tmp_path: Path):
    argv = [*FROZEN, *"--no-save --encode-ahead --train-iters 4 --encoder-chunk-patches 20".split()]
    for in_fp8, order in pools(2).run(train_in_regions, argv, str(tmp_path)):
        assert in_fp8 == 0
        text = " ".join(order)
        first, *windows = text.split(" begin ")
        assert "V" in first.split(), "the first window is nobody's future"
        assert len(windows) == 3, "the last step has none to encode ahead"
        for window in windows:
            ahead, language = window.split(" end")[0], window.split(" end")[-1]
            assert "V" in ahead
            assert "work L" not in ahead, "nothing of the language model is queued beside"
            assert "L" in ahead.split("work")[1], "its first micro-batch runs before the second pass"
            outside = [part.split(" done")[-1] for part in f"done {ahead}".split("work")]
            assert all("V" not in part for part in outside), "vision runs on the stream beside alone"
            assert "V" not in language
