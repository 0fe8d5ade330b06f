"""QK-Clip (MuonClip): the largest logits are exact at every layout, and what they scale is the paper's, on resume too.

The thresholds are far below any that a user would set, so that about half of the heads of a small model are above.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.covering import fast_and_slow, slow
from tests.support.flags import HALF, MODELS
from tests.support.float64 import train_in_float64
from tests.support.muon_reference import farthest_from_reference
from tests.support.pool import Pools
from tests.support.training import SMALL, THREE, assert_same_curve, metrics, train

CLIP = "--qk-clip --set optimizer.qk_clip_threshold=0.0005"
MUON = f"--optimizer muon {CLIP}"
SLOWER = f"{MUON} --lr 1e-4"
RUN = [*SMALL, *THREE, "--no-save"]
# Rows of 64 tokens, a third of them padding.
DIGITS = "--no-save --data digits --seq-length 64 --set model.vision.image_size=32 model.language.vocab_size=160"
PADDED = [*SMALL[: SMALL.index("--images-per-sample")], *DIGITS.split(), "--lr", "1e-3"]
WHOLE, ZERO_3 = "--data-parallel-sharding none", "--data-parallel-sharding full"
GROUPED = (
    "--set model.language.num_query_groups=2 model.language.add_qkv_bias=true model.vision.class_token=true "
    "model.vision.position_embedding=rope2d"
)
# Three heads, which two ranks do not divide: one of a rank is padding.
UNEVEN = "--set model.language.num_attention_heads=3 model.language.num_query_groups=3"
KNOWN = {**MODELS, "grouped": GROUPED, "uneven": UNEVEN}

Records = list[dict[str, Any]]


def assert_same_clipping(ours: Records, theirs: Records, *, tolerance: float) -> None:
    """Losses and norms, and that the same heads were clipped in each step, some but not all."""
    assert_same_curve(ours, theirs, tolerance=tolerance)
    for a, b in zip(ours, theirs, strict=True):
        assert a["max_attention_logit"] == pytest.approx(b["max_attention_logit"], rel=tolerance)
        assert a["qk_clipped_heads"] == b["qk_clipped_heads"] > 0


@pytest.mark.parametrize(
    ("run", "flags"),
    [
        (PADDED, f"--optimizer muon {GROUPED} --micro-batch-size 2 --set optimizer.qk_clip_threshold=0.03"),
        slow(RUN, "--optimizer adamw --recompute-granularity full --ema-decay 0.9"),
        slow(RUN, f"--optimizer muon {GROUPED} --recompute-granularity selective"),
        slow(RUN, "--optimizer lion --lr 1e-4 --set model.language.num_query_groups=1"),
    ],
)
def test_two_steps_are_those_of_the_paper(pools: Pools, tmp_path: Path, run: list[str], flags: str):
    argv = [*run, *"--qk-clip --set optimizer.qk_clip_threshold=0.055".split(), *flags.split()]
    (found,) = pools(1).run(farthest_from_reference, argv, str(tmp_path), 2)
    name, off = max(found.items(), key=lambda item: item[1])
    assert off < 1e-9, f"{name} is off by {off:.1e} of the way that it went"


# In float64, without sharding.
FAST = [(4, "uneven", "--tp 2 --micro-batch-size 2"), (2, "shared-kv", "--cp 2 --cp-comm-type all_gather")]
SLOW = [
    (4, "qwen2.5-vl", "--tp 2 --cp 2"),
    (4, "grouped", "--tp 2 --pp 2 --recompute-granularity full"),
    (4, "latents", "--tp 2 --cp 2"),
    *((world, model, "--micro-batch-size 2") for world in (1, 2) for model in ("plain", "grouped")),
    (4, "qwen2.5-vl", "--tp 4 --no-sequence-parallel"),
    (4, "padded-heads", "--tp 2 --pp 2 --vpp 2"),
    (4, "grouped", "--tp 2 --pp 2 --schedule zb-h1"),
    (4, "gemma3", "--tp 2 --pp 2"),
    (4, "glm4v", "--tp 2 --placement colocated"),
    (4, "frozen-vision", "--tp 2 --placement colocated"),
]


@pytest.mark.parametrize(("world", "model", "flags"), fast_and_slow(FAST, SLOW))
def test_layouts_clip_the_heads_of_one_process(pools, alone, tmp_path, world, model, flags):
    argv = [*RUN, *WHOLE.split(), *KNOWN[model].split(), *MUON.split()]
    pools(world).run(train_in_float64, [*argv, *flags.split()], str(tmp_path))
    assert_same_clipping(metrics(tmp_path), alone(argv, train_in_float64), tolerance=1e-11)


@pytest.mark.parametrize(
    ("world", "model", "optimizer", "flags"),
    [
        (4, "padded-heads", CLIP, "--tp 2 --micro-batch-size 2"),
        slow(2, "grouped", SLOWER, f"{ZERO_3} --placement colocated"),
        slow(4, "grouped", CLIP, "--hybrid-shard-size 2"),
        slow(2, "grouped", CLIP, "--offload optimizer --overlap-param-gather --overlap-grad-reduce"),
        slow(4, "shared-kv", SLOWER, "--pp 2 --data-parallel-sharding optimizer_gradients"),
        slow(2, "plain", f"--optimizer lion --lr 1e-4 {CLIP}", ""),
    ],
)
def test_sharding_clips_the_heads_of_one_process(pools, alone, tmp_path, world, model, optimizer, flags):
    argv = [*RUN, *KNOWN[model].split(), *optimizer.split()]
    pools(world).run(train, [*argv, *flags.split()], str(tmp_path))
    assert_same_clipping(metrics(tmp_path), alone(argv), tolerance=1e-5)


@pytest.mark.slow
def test_a_checkpoint_resumes_on_another_layout(pools: Pools, alone: Any, tmp_path: Path):
    argv = [*SMALL, *GROUPED.split(), *SLOWER.split()]
    for world, flags, length in ((4, "--tp 2 --pp 2", HALF), (2, ZERO_3, [])):
        pools(world).run(train, [*argv, *length, *flags.split()], str(tmp_path))
    assert_same_clipping(metrics(tmp_path), alone(argv), tolerance=1e-5)
