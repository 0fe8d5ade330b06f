"""Stopping and going on changes nothing: bit for bit on the same layout, within fp32 sums on another one."""

from __future__ import annotations

import builtins
import json
import os
import shutil
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megavlm.optim.elementwise import ElementwiseOptimizer
from tests.support.covering import slow
from tests.support.flags import DROPOUT, FOUR, HALF, PADDED, TWO
from tests.support.pool import Pools
from tests.support.training import LEAN, SMALL, assert_resumed, assert_same_curve, metrics, started, train

NONE, ZERO_2 = "--data-parallel-sharding none", "--data-parallel-sharding optimizer_gradients"
FULL, COLOCATED = "--data-parallel-sharding full", "--pp 2 --placement colocated"
MUON, LION = "--optimizer muon", "--optimizer lion --lr 1e-4"
ALONE = "--set model.vision.num_layers=0 --images-per-sample 0"  # a language model without a vision encoder
CLIP = "--qk-clip --set optimizer.qk_clip_threshold=0.0005"  # which clips half of the heads


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        slow(2, "--tp 2 --micro-batch-size 2 --placement colocated --encoder-chunk-patches 20"),
        (2, "--pp 2 --recompute-granularity full"),
        (2, FULL),
        (2, f"{MUON} --tp 2 --micro-batch-size 4"),
        slow(4, "--tp 2 --pp 2 --recompute-granularity full"),
        slow(2, NONE),
        slow(2, f"{COLOCATED} {NONE}"),
        slow(2, f"{COLOCATED} --vision-tp 2"),
        slow(4, f"--tp 2 {ZERO_2} --offload optimizer"),
        slow(2, f"{FULL} --offload optimizer parameters --ema-decay 0.9"),
        slow(4, f"{MUON} --tp 2 --micro-batch-size 2 --set optimizer.muon_precision=bf16"),
        slow(2, f"{MUON} {FULL}"),
        slow(2, f"{MUON} --precision bf16 --placement colocated"),
        slow(2, "--precision bf16 --overlap-grad-reduce --overlap-param-gather"),
        slow(4, "--pp 2 --vpp 2 --precision bf16 --overlap-grad-reduce --overlap-param-gather"),
        slow(2, f"{LION} {NONE} --precision bf16"),
        slow(2, f"{MUON} {CLIP} --tp 2 --micro-batch-size 4 --precision bf16"),
        slow(4, f"{CLIP} {FULL}"),
        slow(4, f"{CLIP} {COLOCATED}"),
        # Weights are coded as themselves, and masters are exact. (Of gradients, what was not sent yet is dropped.)
        slow(2, "--compress-weights int8 --precision bf16"),
        slow(2, f"{FULL} --compress-weights int8 --precision bf16"),
    ],
)
def test_same_layout_resumes_bit_for_bit(pools: Pools, tmp_path: Path, world: int, flags: str):
    argv = [*LEAN, *DROPOUT, *flags.split()]
    pools(world).run(train, [*argv, *FOUR], str(tmp_path / "whole"))
    for length in (TWO, FOUR):
        pools(world).run(train, [*argv, *length], str(tmp_path / "halves"))
    assert_resumed(metrics(tmp_path / "halves"), metrics(tmp_path / "whole"))
    assert_written_once(tmp_path / "halves/checkpoints/iter_0000004")
    assert CLIP not in flags or all(record["qk_clipped_heads"] for record in metrics(tmp_path / "whole"))


def assert_written_once(checkpoint: Path) -> None:
    """Files hold what the descriptions of tensors name, and no copies of it."""
    tensors = json.loads((checkpoint / "items.json").read_text()).values()
    described = sum(length for each in tensors for *_, length, _ in each["pieces"])
    assert described == sum(file.stat().st_size for file in checkpoint.glob("*.distcp"))


@pytest.fixture(scope="module")
def half(run_once) -> Any:
    """Return the folder of half a run, which is trained once."""
    return lambda world, flags: run_once(world, [*SMALL, *PADDED.split(), *HALF, *flags.split()])


BOTH = "--tp 2 --pp 2"
CHANGES = [
    ("", (4, BOTH), (2, "--pp 2 --vpp 2")),
    slow("", (2, "--tp 2 --placement colocated"), (2, "--pp 2")),
    slow("", (2, f"{COLOCATED} --vision-tp 2"), (2, "--tp 2")),
    ("", (4, f"--tp 2 {FULL}"), (2, f"--pp 2 {NONE}")),
    (ALONE, (4, f"{BOTH} --vpp 2"), (2, "--cp 2")),
    slow(ALONE, (2, FULL), (2, "--pp 2 --schedule zb-h1")),
    slow(f"{ALONE} --num-experts 4", (4, "--tp 2 --ep 2"), (2, "--pp 2")),
    slow("", (2, f"{COLOCATED} {NONE}"), (2, "--tp 2")),
    slow("", (4, BOTH), (4, "--pp 4")),
    slow("", (4, BOTH), (4, "--tp 4 --micro-batch-size 4")),
    slow("", (4, BOTH), (2, "")),
    slow("", (4, BOTH), (1, "")),
    slow("", (4, BOTH), (2, COLOCATED)),
    slow("", (2, "--pp 2"), (2, "--tp 2 --placement colocated --vision-tp 2")),
    slow("", (2, COLOCATED), (2, "--tp 2 --placement colocated --vision-tp 2")),
    slow("", (2, "--tp 2"), (4, f"{FULL} --hybrid-shard-size 2")),
    slow("", (4, f"--pp 2 {ZERO_2}"), (2, FULL)),
    slow("", (2, "--tp 2"), (4, f"{FULL} --secondary-shard-size 2")),
    slow("", (4, f"{FULL} --placement colocated --hybrid-shard-size 2"), (2, ZERO_2)),
    slow("", (2, f"{FULL} --offload optimizer parameters"), (2, "--tp 2")),
    slow("", (2, "--pp 2"), (1, f"{FULL} --offload optimizer parameters")),
    slow(f"{MUON} --lr 1e-4", (4, BOTH), (2, FULL)),
    slow(f"{MUON} --lr 1e-4", (2, ZERO_2), (4, "--pp 2 --vpp 2")),
    slow(f"{MUON} --lr 1e-4", (2, "--tp 2"), (2, COLOCATED)),
    slow(LION, (2, "--tp 2"), (4, f"--pp 2 {ZERO_2}")),
]


@pytest.mark.parametrize(("optimizer", "before", "after"), CHANGES)
def test_a_checkpoint_resumes_on_another_layout(pools, alone, half, tmp_path, optimizer, before, after):
    (first, layout), (world, then), run_dir = before, after, tmp_path / "run"
    argv = [*SMALL, *PADDED.split(), *optimizer.split()]
    shutil.copytree(half(first, f"{optimizer} {layout}".strip()), run_dir)
    pools(world).run(train, [*argv, *then.split()], str(run_dir))
    assert_same_curve(metrics(run_dir), alone(argv))


def test_load_starts_from_another_run(pools: Pools, alone: Any, half: Any, tmp_path: Path):
    argv = [*SMALL, *PADDED.split()]
    pools(2).run(train, [*argv, *"--pp 2 --load".split(), str(half(4, "--tp 2 --pp 2"))], str(tmp_path))
    assert_same_curve(metrics(tmp_path), alone(argv)[2:])


def operations(argv: list[str], run_dir: str) -> dict[str, int]:
    """Return what this rank does with the checkpoint from which a run begins: bytes that it reads, files of tensors
    that it opens, and other operations by the name of a file or folder.
    """
    counts, preadv = Counter[str](), os.preadv

    def counted(module: Any, name: str) -> Any:
        function = getattr(module, name)

        def counting(path: Any, *args: Any, **kwargs: Any) -> Any:
            if "checkpoints/iter_" in str(path):
                counts["tensors" if name == "open" and str(path).endswith(".distcp") else "names"] += 1
            return function(path, *args, **kwargs)

        return patch.object(module, name, counting)

    def reading(*args: Any) -> int:
        counts["bytes"] += (count := preadv(*args))
        return count

    named = [(os, name) for name in ("open", "stat", "lstat", "scandir", "listdir", "readlink")]
    with ExitStack() as patched:
        for module, name in [*named, (builtins, "open")]:
            patched.enter_context(counted(module, name))
        patched.enter_context(patch.object(os, "preadv", reading))
        with started(argv, run_dir):
            return dict(counts)


@pytest.mark.parametrize(
    ("world", "flags"), [(4, "--precision bf16"), slow(4, "--precision bf16 --tp 2"), slow(4, f"{COLOCATED} {NONE}")]
)
def test_ranks_read_a_checkpoint_once(pools: Pools, half: Any, tmp_path: Path, world: int, flags: str):
    """All ranks together read each byte of the tensors once, and of what they share no weights, which follow from fp32
    master weights: 12 of 14 bytes; rank 0 alone reads metadata and manifest.
    """
    argv = [*SMALL, *PADDED.split(), *flags.split()]
    shutil.copytree(half(world, flags), tmp_path / "run")
    files = list((tmp_path / "run").rglob("*.distcp"))
    there = sum(file.stat().st_size for file in files)
    ranks = pools(world).run(operations, argv, str(tmp_path / "run"))
    share = 1.1 if NONE in flags else 0.95  # of small files, whose headers are read as well
    assert sum(rank["bytes"] for rank in ranks) <= share * there, f"{ranks} of {there}"
    assert max(rank["bytes"] for rank in ranks) <= 0.5 * sum(rank["bytes"] for rank in ranks), "they share the work"
    assert sum(rank.get("tensors", 0) for rank in ranks) <= 2 * len(files), f"{ranks} open {len(files)} files"
    assert [rank.get("names", 0) > 0 for rank in ranks] == [True, *[False] * (world - 1)], ranks


def train_with_lazy_counts(argv: list[str], run_dir: str) -> None:
    """As `train`, with an optimizer that counts steps as Transformer Engine's: in groups that this rank has any of."""
    step = ElementwiseOptimizer.step

    def lazily(self: ElementwiseOptimizer) -> None:
        every = self.param_groups
        self.param_groups = [group for group in every if group["params"]]
        step(self)
        self.param_groups = every

    with patch.object(ElementwiseOptimizer, "step", lazily):
        train(argv, run_dir)


def test_steps_are_known_where_rank_0_trains_nothing(pools: Pools, tmp_path: Path):
    """An adapter in the last stage alone."""
    lora = "--pp 2 --lora-rank 4 --lora-targets language.layers.2.q_proj --freeze vision projector"
    argv = [*LEAN, *lora.split()]
    pools(2).run(train, argv, str(tmp_path / "whole"))
    pools(2).run(train_with_lazy_counts, [*argv, *HALF], str(tmp_path / "halves"))
    pools(2).run(train_with_lazy_counts, argv, str(tmp_path / "halves"))
    assert_resumed(metrics(tmp_path / "halves"), metrics(tmp_path / "whole"))
