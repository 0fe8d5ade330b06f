"""Gradients and weights that travel as codes: what arrives, how many bytes it takes, and that runs learn as much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.flags import FOUR, TWO
from tests.support.pool import Pools
from tests.support.training import SMALL, TEXT_TO_LEARN, assert_within_a_hundredth, metrics, train, without_wall_time

BF16 = "--precision bf16"
GRADIENTS, WEIGHTS = "--compress-gradients int8", f"--compress-weights int8 {BF16}"


def sums(code: str, steps: int) -> dict[str, Any]:
    """Sum some gradients of this rank with those of all others, a step after the other, in both ways."""
    import torch
    import torch.distributed as dist

    from megavlm.optim.coded_collectives import all_gather, all_reduce, reduce_scatter, reduce_scatter_in_two_levels
    from megavlm.optim.codes import Coded
    from megavlm.parallel.groups import levels_of

    world, rank = dist.get_world_size(), dist.get_rank()
    group, coded, size = dist.group.WORLD, Coded(code), 300  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(rank)
    errors = [torch.zeros(world * size), torch.zeros(world * size)]
    exact, scattered, reduced = torch.zeros(world * size), torch.zeros(size), torch.zeros(world * size)
    for _ in range(steps):
        gradients = torch.randn(world * size, generator=generator)
        exact += gradients
        mine = gradients.clone()
        bytes_scattered = reduce_scatter(mine, group, coded, errors[0])
        scattered += mine.view(world, size)[rank]
        bytes_reduced = all_reduce(gradients, group, coded, errors[1])
        reduced += gradients
    lost = [error.clone() for error in errors]
    for total in (exact, *lost):
        dist.all_reduce(total)
    both = torch.zeros(size)
    if world == 4:  # the second step sends what the first has lost
        levels, kept = levels_of(group, 2, timeout_minutes=1), torch.zeros(world * size // 2)
        for _ in range(2):
            ramp = torch.arange(world * size, dtype=torch.float32) * (rank + 1)
            reduce_scatter_in_two_levels(ramp, levels, coded, kept)
            both += ramp.view(world, size)[rank]
    weights = torch.full((world * size,), float(rank + 1)).bfloat16()
    bytes_gathered = all_gather(weights, group, coded)
    own = slice(rank * size, (rank + 1) * size)
    poisoned = torch.full((world * size,), torch.nan)
    reduce_scatter(poisoned, group, coded, errors[0])
    return {
        "scattered": float((exact[own] - lost[0][own] - scattered).abs().max()),
        "reduced": float((exact - lost[1] - reduced).abs().max()),
        "levels": (both / torch.arange(world * size)[own].clamp(min=1)).tolist() if world == 4 else [20.0],
        "residual": float(lost[0].abs().max()),
        "everywhere": reduced.tolist(),
        "gathered": weights.float().tolist(),
        "bytes": (bytes_scattered, bytes_reduced, bytes_gathered),
        "expected": (
            coded.size(size) * (world - 1),
            2 * coded.size(size) * (world - 1),
            coded.size(size) * (world - 1),
        ),
        "seen": bool(poisoned.view(world, size)[rank].isnan().all()),
        "finite": bool(errors[0].isfinite().all()),
    }


@pytest.mark.parametrize(("world", "code"), [(2, "int8"), (4, "fp8"), pytest.param(4, "bf16", marks=pytest.mark.slow)])
def test_what_is_lost_is_sent_later(pools: Pools, world: int, code: str) -> None:
    """After many steps the sums of what arrived are those of what was sent, but for what the ranks still keep."""
    found = pools(world).run(sums, code, 20)
    for rank in found:
        assert rank["scattered"] < 1e-4
        assert rank["reduced"] < 1e-4
        assert 1e-3 < rank["residual"] < 1, "of one step, not of twenty"
        assert all(total == pytest.approx(20, rel=0.1) for total in rank["levels"][1:])
        assert rank["bytes"] == rank["expected"]
        assert rank["seen"], "a gradient that is not finite reaches its sum"
        assert rank["finite"], "and nothing of it is kept"
        assert rank["gathered"] == [float(1 + place) for place in range(world) for _ in range(300)]
    assert all(rank["everywhere"] == found[0]["everywhere"] for rank in found)


CLOSE = [
    (2, f"{GRADIENTS} {BF16}"),
    (2, WEIGHTS),
    (4, f"{GRADIENTS} {WEIGHTS} --compress-group-size 2"),
]
SLOW = [
    (4, f"--tp 2 {GRADIENTS} {WEIGHTS}"),
    (4, f"--placement colocated --pp 2 {GRADIENTS} --compress-group-size 2"),
    (2, "--compress-gradients fp8"),
    (2, "--compress-gradients bf16"),
    (2, f"{GRADIENTS} --data-parallel-sharding none"),
    (4, f"{GRADIENTS} {WEIGHTS} --hybrid-shard-size 2"),
    (4, f"--pp 2 --vpp 2 {GRADIENTS}"),
    (4, f"--pp 2 --placement colocated {GRADIENTS} {WEIGHTS}"),
    (2, f"{GRADIENTS} --no-overlap-grad-reduce"),
    (2, f"{WEIGHTS} --no-overlap-param-gather"),
    (2, f"{GRADIENTS} --language-tie-embeddings"),
    (2, f"{GRADIENTS} --freeze vision --offload optimizer"),
]


@pytest.mark.parametrize(("world", "flags"), [*CLOSE, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_runs_are_close_to_exact_ones(pools: Pools, tmp_path: Path, world: int, flags: str) -> None:
    """Four steps: a wrong sum, or weights that differ between ranks, would change the norm by far more."""
    words = flags.split()
    exact = [*words, "--compress-gradients", "none", "--compress-weights", "none"]
    if "--compress-group-size" in exact:
        place = exact.index("--compress-group-size")
        del exact[place : place + 2]
    pools(world).run(train, [*SMALL, "--no-save", *words], str(tmp_path / "coded"))
    pools(world).run(train, [*SMALL, "--no-save", *exact], str(tmp_path / "exact"))
    coded, plain = metrics(tmp_path / "coded"), metrics(tmp_path / "exact")
    assert len(coded) == len(plain) == 4
    for ours, theirs in zip(coded, plain, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=3e-2)
    assert any(ours["grad_norm"] != theirs["grad_norm"] for ours, theirs in zip(coded, plain, strict=True))


def test_coded_weights_resume_bit_for_bit(pools: Pools, tmp_path: Path) -> None:
    """They are coded as themselves, and masters are exact. (Of gradients, what was not sent yet is dropped.)"""
    argv = [*SMALL, *WEIGHTS.split()]
    pools(2).run(train, [*argv, *FOUR], str(tmp_path / "whole"))
    for length in (TWO, FOUR):
        pools(2).run(train, [*argv, *length], str(tmp_path / "halves"))
    assert without_wall_time(metrics(tmp_path / "halves")) == without_wall_time(metrics(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    # Of one micro-batch in bf16, gradients are bf16 numbers already.
    [
        GRADIENTS,
        "--compress-gradients fp8",
        "--compress-gradients bf16 --precision fp32",
        WEIGHTS,
        f"{GRADIENTS} {WEIGHTS}",
    ],
)
def test_200_steps_end_within_a_hundredth_of_exact(pools: Pools, tmp_path: Path, flags: str) -> None:
    exact = f"{flags} --compress-gradients none --compress-weights none"
    for name, words in (("exact", exact), ("coded", flags)):
        argv = [*TEXT_TO_LEARN, "--global-batch-size", "8", *words.split()]
        pools(2).run(train, argv, str(tmp_path / name))
    assert_within_a_hundredth(metrics(tmp_path / "coded"), metrics(tmp_path / "exact"))
