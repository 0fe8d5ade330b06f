"""Clips as data of a run, on a tiny Qwen2.5-VL: packed and balanced, resumed, encoded ahead, cached, out of tars."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.pool import Pools

pytest.importorskip("av", reason="pip install av (the extra `video`)")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

from collections.abc import Callable
from unittest.mock import patch

import pytest

from megavlm.pipeline.encoder import EncoderRunner
from megavlm.programs import prepare as prepare_data
from tests.support.clips import clip
from tests.support.processors import picture
from tests.support.training import assert_same_curve, metrics, train_composed, without_wall_time
from tests.support.whole_models import whole_folder

VIDEOS = {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "patch_size": 14,
    "size": {"shortest_edge": 4 * 28**2, "longest_edge": 8 * 28**2},
}
RUN = (
    "--precision fp32 --train-iters 4 --lr-decay-iters 20 --lr-warmup-iters 1 --lr 1e-3 --global-batch-size 4 "
    "--micro-batch-size 1 --seq-length 192 --packing-window 12 --num-workers 0 --no-tensorboard --seed 3 "
    "--save-interval 0"
).split()
FROZEN = "--placement colocated --freeze vision projector --pp 2".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and records with clips of several lengths, a folder of frames, images, both, and neither."""
    root = tmp_path_factory.mktemp("clips")
    model, _, _ = whole_folder("qwen2.5-vl", root)
    (model / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS))
    media = root / "media"
    (media / "frames").mkdir(parents=True)
    from PIL import Image

    for number in range(4):
        Image.fromarray(picture(60, 90, seed=number)).save(media / "frames" / f"{number}.png")
        frames = [picture(60 + 30 * number, 90, seed=10 * number + each) for each in range(8 + 6 * number)]
        (media / f"{number}.mp4").write_bytes(clip(len(frames), rate=6, frames=frames))
    kinds: list[dict[str, Any]] = [
        {"video": "0.mp4"},
        {"image": "frames/1.png"},
        {"video": "1.mp4", "fps": 1},
        {},
        {"video": "frames", "fps": 2},
        {"image": "frames/2.png", "video": "2.mp4"},
        {"video": ["3.mp4", "0.mp4"]},
    ]
    rng = np.random.default_rng(0)
    lines = []
    for number in range(40):
        words = " ".join(rng.choice(["cat", "dog", "tree", "two", "red"], int(rng.integers(1, 9))))
        turns = [{"from": "human", "value": f"What {words}?"}, {"from": "gpt", "value": f"A {words} {number}."}]
        lines.append(json.dumps({**kinds[number % len(kinds)], "conversations": turns}))
    (root / "train.jsonl").write_text("\n".join(lines))
    return root


def train_without_encoder(argv: list[str], run_dir: str) -> None:
    """Fails where the encoder runs."""
    with patch.object(EncoderRunner, "_run", None):
        train_composed(argv, run_dir)


def flags(folder: Path, source: Path | None = None) -> list[str]:
    data = str(source or f"{folder / 'train.jsonl'},image_root={folder / 'media'}")
    return [*RUN, "--init-from", str(folder / "hf"), "--datasets", data]


@pytest.fixture(scope="module")
def whole(run_once, folder: Path) -> Path:
    return run_once(1, [*flags(folder), "--no-save"], train_composed)


@pytest.mark.slow
def test_two_replicas_with_workers_and_a_stop_train_on_the_same_clips(pools, folder, whole, tmp_path):
    pools(1).run(train_composed, [*flags(folder), "--train-iters", "2"], str(tmp_path))
    pools(2).run(train_composed, [*flags(folder), "--num-workers", "1"], str(tmp_path))
    assert_same_curve(metrics(tmp_path), metrics(whole))
    for record in metrics(whole):
        assert record["skipped_samples"] == 0
        assert record["packing_efficiency"] > 0.6
        assert record["images"] > 8, "pairs of frames are counted as images"
    balanced = metrics(tmp_path)[2:]
    assert all(1 <= record["imbalance_vision"] <= record["imbalance_vision_before"] for record in balanced)


@pytest.mark.slow
def test_a_frozen_encoder_encodes_clips_ahead_or_finds_their_features(pools, folder, tmp_path):
    argv = [*flags(folder), *FROZEN]
    pools(2).run(train_composed, [*argv, "--no-save"], str(tmp_path / "plain"))
    pools(2).run(train_composed, [*argv, "--encode-ahead", "--train-iters", "2"], str(tmp_path / "ahead"))
    pools(2).run(train_composed, [*argv, "--encode-ahead"], str(tmp_path / "ahead"))
    assert without_wall_time(metrics(tmp_path / "ahead")) == without_wall_time(metrics(tmp_path / "plain"))
    cached = [*argv, "--no-save", "--vision-cache", str(tmp_path / "cache")]
    pools(2).run(train_composed, cached, str(tmp_path / "first"))
    pools(2).run(train_without_encoder, cached, str(tmp_path / "second"))
    for run in ("first", "second"):
        assert_same_curve(metrics(tmp_path / run), metrics(tmp_path / "plain"))


@pytest.mark.slow
def test_clips_in_tars_are_those_of_the_files_and_resume_exactly(pools: Pools, folder: Path, tmp_path: Path) -> None:
    tars = tmp_path / "tars"
    assert prepare_data.main([f"{folder / 'train.jsonl'},image_root={folder / 'media'}", str(tars)]) == 0
    argv = [*flags(folder, tars), "--no-shuffle"]
    pools(1).run(train_composed, [*argv, "--no-save"], str(tmp_path / "whole"))
    pools(1).run(train_composed, [*argv, "--train-iters", "2"], str(tmp_path / "halves"))
    pools(1).run(train_composed, [*argv, "--num-workers", "1"], str(tmp_path / "halves"))
    assert without_wall_time(metrics(tmp_path / "halves")) == without_wall_time(metrics(tmp_path / "whole"))
    pools(1).run(train_composed, [*flags(folder), "--no-shuffle", "--no-save"], str(tmp_path / "files"))
    assert_same_curve(metrics(tmp_path / "whole"), metrics(tmp_path / "files"))


pytest.importorskip("av", reason="pip install av (the extra `video`)")


FAMILIES = ("qwen2.5-vl", "qwen3-vl", "onevision", "internvl", "smolvlm", "minicpmv-4.7", "kimi")
LAYOUTS = {
    "tp2": (2, "--tp 2"),
    "pp2": (2, "--pp 2"),
    "tp2-pp2-vpp2": (4, "--tp 2 --pp 2 --vpp 2"),
    "colocated": (4, "--tp 2 --pp 2 --placement colocated"),
}
# Each family on two layouts, and each layout with two families or more.
CASES = [(family, layout) for number, family in enumerate(FAMILIES) for layout in (list(LAYOUTS) * 2)[number % 4 :][:2]]
FRAMES = (9, 14, 31)  # of each clip, of which four are taken of each second
OPTIONS = (
    "--precision fp32 --seq-length 256 --train-iters 3 --lr-decay-iters 20 --lr-warmup-iters 1 --lr 1e-3 "
    "--gbs 4 --mbs 1 --video-fps 4 --video-max-tokens 100 --num-workers 0 --packing-window 8 --no-save --no-tensorboard"
).split()
# What a folder says of its frames; the sizes are those of `tests/support/whole_models.py`.
FRAMES_OF = {
    "qwen2.5-vl": {"patch_size": 14, "size": {"shortest_edge": 4 * 28**2, "longest_edge": 16 * 28**2}},
    "qwen3-vl": {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 100_000}},
    "onevision": {"size": {"height": 28, "width": 28}},
    "internvl": {"size": {"height": 28, "width": 28}},
    "smolvlm": {"max_image_size": {"longest_edge": 32}, "num_frames": 5},
    "minicpmv-4.7": {"patch_size": 4, "scale_resolution": 48, "max_slice_nums": 2},
    "kimi": {"max_patches": 20, "fps": 4},
}


@pytest.fixture(scope="module")
def single(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[str], Path]]:
    """The arguments of a family's run, and the folder of its run in one process, made when first asked for."""
    made: dict[str, tuple[list[str], Path]] = {}

    def run(family: str) -> tuple[list[str], Path]:
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            folder, _, _ = whole_folder(family, root)
            (folder / "video_preprocessor_config.json").write_text(json.dumps(FRAMES_OF[family]))
            for number, frames in enumerate(FRAMES):
                (root / f"{number}.mp4").write_bytes(clip(frames, rate=12))
            records = [
                {
                    "video": f"{number % len(FRAMES)}.mp4",
                    "conversations": [
                        {"from": "human", "value": "<video>\nWhat happens?"},
                        {"from": "gpt", "value": f"{number}, it is blue."},
                    ],
                }
                for number in range(16)
            ]
            (root / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            argv = [*OPTIONS, "--init-from", str(folder), "--datasets", str(root / "train.jsonl")]
            pools(1).run(train_composed, argv, str(root / "run"))
            made[family] = argv, root / "run"
        return made[family]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_any_layout_trains_alike_on_videos(pools, single, tmp_path, family, layout):
    argv, whole = single(family)
    world, flags = LAYOUTS[layout]
    pools(world).run(train_composed, [*argv, *flags.split()], str(tmp_path))
    expected = metrics(whole)
    assert_same_curve(metrics(tmp_path), expected)
    assert all(record["images"] >= 4 for record in expected)
    assert not any(record.get("skipped_samples") for record in expected)
