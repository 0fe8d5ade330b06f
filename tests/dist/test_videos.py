"""Records with videos, of every family that reads them: any layout trains on the same clips, to the same losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pool import Pools

pytest.importorskip("av", reason="pip install av (the extra `video`)")

from megavlm.checkpoint.hf.pretrained import with_pretrained_model
from tests.support.clips import clip
from tests.support.training import assert_same_curve, metrics, train
from tests.support.whole_models import whole_folder

FAMILIES = ("qwen2.5-vl", "qwen3-vl", "onevision", "internvl", "smolvlm", "minicpmv-4.7")
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
VIDEOS = {
    "qwen2.5-vl": {"patch_size": 14, "size": {"shortest_edge": 4 * 28**2, "longest_edge": 16 * 28**2}},
    "qwen3-vl": {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 100_000}},
    "onevision": {"size": {"height": 28, "width": 28}},
    "internvl": {"size": {"height": 28, "width": 28}},
    "smolvlm": {"max_image_size": {"longest_edge": 32}, "num_frames": 5},
    "minicpmv-4.7": {"patch_size": 4, "scale_resolution": 48, "max_slice_nums": 2},
}


@pytest.fixture(scope="module")
def single(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[str], Path]]:
    """The arguments of a family's run, and the folder of its run in one process, made when first asked for."""
    made: dict[str, tuple[list[str], Path]] = {}

    def run(family: str) -> tuple[list[str], Path]:
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            folder, _, _ = whole_folder(family, root)
            (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS[family]))
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
            pools(1).run(train, argv, str(root / "run"), with_pretrained_model)
            made[family] = argv, root / "run"
        return made[family]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_any_layout_trains_alike_on_videos(pools, single, tmp_path, family, layout):
    argv, whole = single(family)
    world, flags = LAYOUTS[layout]
    pools(world).run(train, [*argv, *flags.split()], str(tmp_path), with_pretrained_model)
    expected = metrics(whole)
    assert_same_curve(metrics(tmp_path), expected)
    assert all(record["images"] >= 4 for record in expected)
    assert not any(record.get("skipped_samples") for record in expected)
