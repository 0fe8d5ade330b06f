"""Context parallelism gives the numbers of one process: every layout that splits rows, with and without images."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.covering import covering, pairs, short_and_long, slow
from tests.support.data_files import sources_of, write_all
from tests.support.flags import DROPOUT, FOUR, MODELS, TWO
from tests.support.float64 import train_in_float64
from tests.support.pool import Pools
from tests.support.training import LONG, SMALL, assert_resumed, assert_same_curve, metrics, train

LAYOUTS = {
    "cp2": (2, "--cp 2"),
    "cp4": (4, "--cp 4 --micro-batch-size 2"),
    "cp2-tp2": (4, "--cp 2 --tp 2"),
    "cp2-pp2": (4, "--cp 2 --pp 2"),
    "cp2-pp2-vpp2": (4, "--cp 2 --pp 2 --vpp 2"),
    "cp2-dp2": (4, "--cp 2"),
}
FAST = [
    ("cp2-tp2", "qwen3-vl", "--micro-batch-size 2"),
    ("cp2-pp2-vpp2", "one-image-rank", ""),
    ("cp2-dp2", "gemma3", ""),
    ("cp2", "audio", ""),
    ("cp2-tp2", "latents", ""),
    ("cp2", "sinks", ""),
    ("cp4", "qwen3.5", ""),  # two ranks exchange heads, and two such groups gather rows
]
# 1.06e-5 in the gradient norm of iteration 12, and nothing in float64: as in test_parity.py, where such a weight is
# followed.
TOLERANCES = {("cp2-tp2", "glm4v", ""): 2e-5}
SLOW = [
    ("cp2-tp2", "gemma4", ""),
    # Each layout, and each model with each axis and with either place of the encoder.
    *covering(
        ((layout, model, option) for layout in LAYOUTS for model in MODELS for option in ("", "--placement colocated")),
        lambda case: {
            (case[0], case[2]),
            *pairs([case[1]], {"tp2", "pp2"}.intersection(case[0].split("-")), [case[2]]),
        },
    ),
    ("cp2-tp2", "rich", "--no-sequence-parallel"),
    ("cp2-tp2", "padded-heads", "--recompute-granularity selective"),
    ("cp2", "rich", "--recompute-granularity full"),
    ("cp2-dp2", "rich", "--data-parallel-sharding none"),
    ("cp2-dp2", "one-image-rank", "--overlap-grad-reduce --overlap-param-gather"),
    ("cp2-dp2", "rich", "--hybrid-shard-size 2"),
    ("cp2-tp2", "padded-heads", "--placement colocated --no-sequence-parallel"),
    ("cp2-pp2-vpp2", "llava-onevision", "--placement colocated --encoder-chunk-patches 20"),
    ("cp2-tp2", "rich", "--placement colocated --vision-tp 2"),
    ("cp2-dp2", "frozen-vision-projector", "--placement colocated --encode-ahead"),
    *[(f"cp2-{other}", "qwen3-vl", "--data-parallel-sharding full") for other in ("dp2", "tp2")],
    *[(f"cp2-{other}", "qwen3-vl", "--data-parallel-sharding optimizer_gradients") for other in ("dp2", "pp2")],
    ("cp4", "plain", "--set execution.loss_chunk_tokens=2"),
    *[(layout, "rich", "--cp-comm-type all_gather") for layout in ("cp4", "cp2-tp2", "cp2-pp2-vpp2", "cp2-dp2")],
    ("cp2-tp2", "qwen3-vl", "--cp-comm-type all_gather --placement colocated"),
    *TOLERANCES,
]


@pytest.mark.parametrize(("layout", "model", "option", "steps"), short_and_long(FAST, [*FAST, *SLOW]))
def test_every_split_of_rows_gives_the_numbers_of_one_process(
    pools, one_process, tmp_path, layout, model, option, steps
):
    world, flags = LAYOUTS[layout]
    argv = [*SMALL, "--no-save", *MODELS[model].split(), *flags.split(), *option.split(), *steps]
    pools(world).run(train, argv, str(tmp_path))
    tolerance = TOLERANCES.get((layout, model, option), 1e-5)
    assert_same_curve(metrics(tmp_path), one_process(model, steps), tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "model", "option"), TOLERANCES)
def test_in_float64_rows_that_need_a_tolerance_give_the_numbers_of_one_process(pools, tmp_path, layout, model, option):
    world, flags = LAYOUTS[layout]
    argv = [*SMALL, "--no-save", "--data-parallel-sharding", "none", *MODELS[model].split(), *LONG]
    pools(1).run(train_in_float64, argv, str(tmp_path / "one"))
    pools(world).run(train_in_float64, [*argv, *flags.split(), *option.split()], str(tmp_path / "many"))
    assert_same_curve(metrics(tmp_path / "many"), metrics(tmp_path / "one"), tolerance=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--lora-rank 4", "--offload optimizer activations"])
def test_other_runs_split_rows(pools, tmp_path, flags):
    argv = [*SMALL, "--no-save", *flags.split()]
    pools(1).run(train, argv, str(tmp_path / "one"))
    pools(4).run(train, [*argv, *"--cp 2 --tp 2".split()], str(tmp_path / "four"))
    assert_same_curve(metrics(tmp_path / "four"), metrics(tmp_path / "one"))


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (4, "model.language.num_query_groups=3 --images-per-sample 3 0 2 1 --image-sizes 16 24 32 --seq-length 64"),
        slow(3, "model.language.num_query_groups=2 --seq-length 33"),
    ],
)
def test_heads_that_context_ranks_do_not_divide(pools, alone, tmp_path, world, flags):
    """Six heads on four ranks: two exchange heads, two groups of them gather keys and values.

    The first rank encodes the largest image, which is not the first of its sample: features arrive in another order
    than that of their tokens.
    """
    argv = [*SMALL, "--no-save", *f"--set model.language.num_attention_heads=6 {flags}".split()]
    pools(world).run(train, [*argv, "--cp", str(world)], str(tmp_path))
    assert_same_curve(metrics(tmp_path), alone(argv))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layout"), [(2, "--cp 2"), (4, "--cp 2 --tp 2"), (4, "--cp 4 --mbs 2")])
def test_packed_rows_may_be_split_anywhere(pools: Pools, tmp_path: Path, world: int, layout: str) -> None:
    """Samples of packed rows cross the borders of parts, and no sample is padded for it."""
    data = sources_of(write_all(tmp_path / "data"))
    argv = [*SMALL, *"--images-per-sample 1 --image-sizes --seq-length 96 --packing-window 16".split(), *data]
    pools(1).run(train, [*argv, "--no-save"], str(tmp_path / "one"))
    pools(world).run(train, [*argv, *layout.split(), "--no-save"], str(tmp_path / "many"))
    ours, expected = metrics(tmp_path / "many"), metrics(tmp_path / "one")
    assert_same_curve(ours, expected)
    for record, other in zip(ours, expected, strict=True):
        assert record["packing_efficiency"] == other["packing_efficiency"] > 0.5
        for name, loss in record["loss_by_source"].items():
            theirs = other["loss_by_source"][name]
            assert loss is theirs is None or loss == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_on_other_layouts(pools: Pools, one_process, tmp_path: Path) -> None:
    argv = [*SMALL, *DROPOUT, "--cp", "2"]
    pools(2).run(train, [*argv, *FOUR, "--no-save"], str(tmp_path / "whole"))
    pools(2).run(train, [*argv, *TWO], str(tmp_path / "halves"))
    pools(2).run(train, [*argv, *FOUR], str(tmp_path / "halves"))
    assert_resumed(metrics(tmp_path / "halves"), metrics(tmp_path / "whole"))
    layouts = ((2, "--cp 2"), (2, "--tp 2"), (1, ""), (2, "--cp 2"), (4, "--cp 2 --tp 2"))
    for number, (world, layout) in enumerate(layouts):
        steps = ["--train-iters", str(number + 2)]
        pools(world).run(train, [*SMALL, *layout.split(), *steps], str(tmp_path / "moved"))
    assert_same_curve(metrics(tmp_path / "moved"), one_process("plain", ["--train-iters", "6"]))
