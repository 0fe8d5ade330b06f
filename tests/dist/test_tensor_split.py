"""Tensor parallelism that divides neither heads nor widths gives the numbers, and the files, of one process; so does
padding that aligns widths, on one process too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megavlm.arch import tensor_split
from megavlm.model.rank_parts import part_of_rank
from megavlm.model.vlm import bare_chunk
from megavlm.programs import convert
from megavlm.train import loop
from tests.support import hf
from tests.support.answers import answers
from tests.support.covering import short_and_long, slow
from tests.support.flags import HALF
from tests.support.pool import Pools
from tests.support.tiny_models import tiny
from tests.support.training import SMALL, assert_same_curve, metrics, train, train_composed

# Key/value heads that two to four ranks share; widths of MLPs and of the vocabulary that are prime.
WIDTHS = (
    "--set model.language.ffn_hidden_size=61 model.vision.ffn_hidden_size=47 model.projector.hidden_size=53 "
    "--weight-decay 0.2"
)
RICH = f"--set model.language.qk_norm=true model.language.add_qkv_bias=true model.vision.activation=swiglu {WIDTHS}"
WIDE = (
    "--set model.language.num_attention_heads=6 model.language.num_query_groups=6 model.language.ffn_hidden_size=250 "
    "model.vision.ffn_hidden_size=254"
)
MODELS = {
    "3-in-1": f"--set model.language.num_attention_heads=3 model.language.num_query_groups=1 {RICH}",
    "6-in-2": f"--set model.language.num_attention_heads=6 model.language.num_query_groups=2 {RICH} --set "
    "model.language.tie_embeddings=true",
    # Slots of one key/value head on one rank and on two, each with a part of 3 or 2 channels; none is padding.
    "6-in-3": "--set model.language.num_attention_heads=6 model.language.num_query_groups=3 "
    f"model.language.kv_channels=6 {WIDTHS}",
    "14-in-2": "--set model.language.num_attention_heads=14 model.language.num_query_groups=2 "
    f"model.language.kv_channels=6 {RICH}",
    # No key/value head is shared; the last rank has heads of zeros.
    "5-in-5": "--set model.language.num_attention_heads=5 model.language.num_query_groups=5 "
    f"model.language.kv_channels=8 {WIDTHS} --projector-kind linear",
    "gated": "--set model.language.num_attention_heads=3 model.language.num_query_groups=1 --projector-kind gated "
    f"{WIDTHS} --set model.language.hidden_size=51 model.language.kv_channels=16",
    "lora": f"--set model.language.num_attention_heads=6 model.language.num_query_groups=2 {RICH} --lora-rank 4 "
    "--lora-dropout 0 --lora-targets language vision --freeze projector",
    # Heads that TP divides, and MLPs that one process and two pad alike, to 256.
    "wide": f"{WIDE} --set model.vision.activation=quick_gelu --weight-decay 0.2",
    "wide-gated": f"{WIDE} --set model.vision.activation=swiglu",
}
FAST = [(1, "wide", "--micro-batch-size 4"), (2, "3-in-1", "--tp 2 --pp 1"), (2, "14-in-2", "--cp 2")]
SLOW = [
    (4, "14-in-2", "--tp 2 --cp 2"),
    (2, "wide-gated", "--tp 2 --micro-batch-size 4"),
    (4, "6-in-2", "--tp 4 --micro-batch-size 2 --data-parallel-sharding none"),
    (4, "lora", "--tp 4 --micro-batch-size 2"),
    # The last rank has padding alone.
    *[(4, model, "--tp 4 --micro-batch-size 2") for model in ("3-in-1", "5-in-5", "gated")],
    *[
        (4, "3-in-1", f"--tp 4 --micro-batch-size 2 {more}")
        for more in ("--data-parallel-sharding full", "--optimizer muon")
    ],
    *[(1, model, "") for model in ("wide-gated", "lora")],
    (2, "wide", "--tp 2"),
    (2, "wide", "--data-parallel-sharding optimizer_gradients"),
    *[(4, model, "--tp 4 --micro-batch-size 4") for model in ("6-in-2", "14-in-2", "lora")],
    *[(3, model, "--tp 3 --seq-length 33 --micro-batch-size 2") for model in list(MODELS)[::2]],
    *[(4, model, "--tp 2 --pp 2 --vpp 2") for model in list(MODELS)[1::2]],
    (4, "3-in-1", "--tp 2 --data-parallel-sharding optimizer_gradients"),
    (4, "3-in-1", "--tp 2 --data-parallel-sharding full"),
    (4, "3-in-1", "--tp 2 --overlap-grad-reduce --overlap-param-gather"),
    (4, "6-in-2", "--tp 4 --micro-batch-size 2 --no-sequence-parallel"),
    (4, "6-in-2", "--tp 4 --micro-batch-size 2 --recompute-granularity full"),
    (4, "6-in-2", "--tp 4 --micro-batch-size 2 --recompute-granularity selective"),
    (4, "6-in-2", "--tp 4 --micro-batch-size 2 --offload optimizer activations"),
    (4, "6-in-2", "--tp 2 --pp 2 --placement colocated --vision-tp 4"),
    (4, "3-in-1", "--tp 2 --cp 2 --cp-comm-type all_gather"),
    (4, "3-in-1", "--tp 2 --cp 2 --data-parallel-sharding full"),
    (8, "14-in-2", "--tp 4 --cp 2 --micro-batch-size 2"),
    (8, "14-in-2", "--tp 4 --pp 2"),
]


def train_without_alignment(argv: list[str], run_dir: str) -> None:
    """As `train`, but MLPs are as wide as the model says: on one process nothing is padded."""
    with patch.object(tensor_split, "MLP_MULTIPLE", 1):
        train(argv, run_dir)


def train_with_padding(argv: list[str], run_dir: str) -> int:
    """As `train`; return how many numbers of this rank are padding, after a check that all of them are zeros."""
    count, close = 0, loop.close

    def checked(run: Any, *error: Any) -> None:
        nonlocal count
        for chunk in map(bare_chunk, run.engine.model_chunks):
            tp = chunk.groups.tp
            for entry in chunk.sharded_state_dict().values():
                part = part_of_rank(entry.key, run.config.model, tp=tp.size(), rank=tp.rank())
                if part is not None:
                    padding = entry.data.detach().clone()
                    for each in part.runs:
                        padding.narrow(part.axis, each.local, each.count).fill_(0)
                    assert padding.count_nonzero() == 0, entry.key
                    held = sum(each.count for each in part.runs) * padding.numel() // padding.shape[part.axis]
                    count += padding.numel() - held
        close(run, *error)

    with patch.object(loop, "close", checked):
        train(argv, run_dir)
    return count


@pytest.fixture(scope="module")
def curve(alone: Any):
    """Return the metrics of a model on one process without padding."""
    return lambda *argv: alone([*SMALL, *argv], train_without_alignment)


@pytest.mark.parametrize(("world", "model", "flags", "steps"), short_and_long(FAST, [*FAST, *SLOW]))
def test_every_layout_of_them_trains_as_one_process(pools, curve, tmp_path, world, model, flags, steps):
    argv = [*MODELS[model].split(), *steps]
    alike = [word for each in ("--seq-length 33", "--optimizer muon") if each in flags for word in each.split()]
    program = train if "--data-parallel-sharding full" in flags or "_gradients" in flags else train_with_padding
    padded = pools(world).run(program, [*SMALL, *argv, *flags.split(), "--no-save"], str(tmp_path))
    assert_same_curve(metrics(tmp_path), curve(*argv, *alike))
    assert program is train or any(padded), "no rank has padding: the case shows nothing"


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        slow("3-in-1", (2, "--tp 2 --micro-batch-size 4"), (1, "")),
        slow("6-in-2", (1, ""), (4, "--tp 4 --micro-batch-size 2")),
        slow(
            "14-in-2", (3, "--tp 3 --no-sp --data-parallel-sharding none"), (4, "--tp 4 --data-parallel-sharding none")
        ),
        slow("lora", (4, "--tp 4"), (2, "--tp 2 --data-parallel-sharding full")),
        slow("5-in-5", (2, "--tp 2"), (3, "--tp 3 --no-sp")),
    ],
)
def test_checkpoints_resume_with_another_tensor_parallelism(pools, curve, tmp_path, model, before, after):
    for (world, flags), length in ((before, HALF), (after, [])):
        pools(world).run(train, [*SMALL, *MODELS[model].split(), *length, *flags.split()], str(tmp_path))
    assert_same_curve(metrics(tmp_path), curve(*MODELS[model].split()))


@pytest.mark.parametrize(("world", "flags"), [(1, ""), slow(2, "--tp 2")])
def test_checkpoints_without_aligned_widths_resume_with_them(pools, curve, tmp_path, world, flags):
    argv = [*SMALL, *MODELS["wide-gated"].split()]
    pools(1).run(train_without_alignment, [*argv, *HALF], str(tmp_path))
    assert any(pools(world).run(train_with_padding, [*argv, *flags.split()], str(tmp_path)))
    assert_same_curve(metrics(tmp_path), curve(*MODELS["wide-gated"].split()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "flags"),
    [("3-in-1", "--tp 4"), *[("14-in-2", flags) for flags in ("--tp 4", "--tp 2 --pp 2", "--tp 2 --cp 2")]],
)
def test_answers_are_those_of_one_process(pools, tmp_path, model, flags):
    argv = [*SMALL, "--no-save", "--init-method-std", "0.2", *MODELS[model].split()]
    (expected,) = pools(1).run(answers, argv, str(tmp_path / "one"))
    assert len({tuple(answer) for answer in expected}) > 1, "the prompts make no difference"
    assert pools(4).run(answers, [*argv, *flags.split()], str(tmp_path / "four")) == [expected] * 4


@pytest.mark.parametrize(("adapters", "worlds"), [(False, (4,)), slow(False, (1, 8)), slow(True, ())])
def test_exports_are_byte_equal(pools: Pools, tmp_path: Path, adapters: bool, worlds: tuple[int, ...]) -> None:
    """A run that changes nothing gives back the folder that it began with; adapters, those of one process."""
    odd = {"hidden_size": 48, "intermediate_size": 61, "num_attention_heads": 6}
    vision = {"intermediate_size": 45, "out_hidden_size": 48}
    folder = hf.save(tiny("qwen2.5-vl", vision=vision, text=odd), tmp_path / "hf")
    argv = (
        f"--init-from {folder} --global-batch-size 4 --micro-batch-size 4 --seq-length {hf.LENGTH} --lr-warmup-iters 0 "
        f"--lr-decay-style constant --no-tensorboard --precision fp32 --image-sizes 16 "
        "--train-iters"
    ).split()
    if not adapters:
        for world in worlds:  # on eight, two ranks have no query head
            run, out = str(tmp_path / f"of-{world}"), tmp_path / f"from-{world}"
            pools(world).run(train_composed, [*argv, *f"1 --tp {world} --lr 1e-30".split()], run)
            assert convert.main(["export", run, str(out)]) == 0
            assert hf.different(folder, out) == []
        return
    adapted = "--lora-rank 3 --lora-targets language vision --freeze projector".split()
    pools(1).run(train_composed, [*argv, *"2 --lr 1e-2".split(), *adapted], str(tmp_path / "lora"))
    assert convert.main(["export-lora", str(tmp_path / "lora"), str(tmp_path / "one")]) == 0
    pools(4).run(train_composed, [*argv, *"3 --tp 4 --lr 1e-30".split(), *adapted], str(tmp_path / "lora"))
    assert convert.main(["export-lora", str(tmp_path / "lora"), str(tmp_path / "again")]) == 0
    assert hf.different(tmp_path / "one", tmp_path / "again") == []
