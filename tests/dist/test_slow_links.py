"""Gradients and weights that travel as codes: what arrives, and that runs learn as much."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megavlm.optim.codes import Coded, all_gather, all_reduce, reduce_scatter, reduce_scatter_in_two_levels
from megavlm.optim.slow_links import CodedUnitGather, CodedUnitReduction, coded_reductions, forget_errors
from megavlm.parallel.groups import GroupMaker, levels_of
from tests.support.covering import fast_and_slow, slow
from tests.support.pool import Pools
from tests.support.training import LEAN, SMALL, TEXT_TO_LEARN, assert_within_a_hundredth, metrics, started, train

BF16 = "--precision bf16"
FULL = "--data-parallel-sharding full"
GRADIENTS, WEIGHTS = "--compress-gradients int8", f"--compress-weights int8 {BF16}"


def sums(code: str, steps: int) -> dict[str, Any]:
    """Sum some gradients of this rank with those of all others, a step after the other, in both ways."""
    with torch.device("cuda" if dist.get_backend() == "nccl" else "cpu"):
        return _sums(code, steps)


def _sums(code: str, steps: int) -> dict[str, Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    group, coded, size = dist.group.WORLD, Coded(code), 300  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(rank)
    errors = [torch.zeros(world * size), torch.zeros(world * size)]
    exact, scattered, reduced = torch.zeros(world * size), torch.zeros(size), torch.zeros(world * size)
    for _ in range(steps):
        gradients = torch.randn(world * size, generator=generator, device="cpu").to(errors[0].device)
        exact += gradients
        mine = gradients.clone()
        reduce_scatter(mine, group, coded, errors[0])
        scattered += mine.view(world, size)[rank]
        all_reduce(gradients, group, coded, errors[1])
        reduced += gradients
    lost = [error.clone() for error in errors]
    for total in (exact, *lost):
        dist.all_reduce(total)
    both = torch.zeros(size)
    if world == 4:  # the second step sends what the first has lost
        levels, kept = levels_of(group, 2, GroupMaker(timedelta(minutes=1))), torch.zeros(world * size // 2)
        for _ in range(2):
            ramp = torch.arange(world * size, dtype=torch.float32) * (rank + 1)
            reduce_scatter_in_two_levels(ramp, levels, coded, kept)
            both += ramp.view(world, size)[rank]
    weights = torch.full((world * size,), float(rank + 1)).bfloat16()
    all_gather(weights, group, coded)
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
        "seen": bool(poisoned.view(world, size)[rank].isnan().all()),
        "finite": bool(errors[0].isfinite().all()),
    }


@pytest.mark.parametrize(("world", "code"), [(2, "int8"), (4, "fp8"), slow(4, "bf16")])
def test_what_is_lost_is_sent_later(pools: Pools, world: int, code: str) -> None:
    """After many steps the sums of what arrived are those of what was sent, but for what the ranks still keep."""
    found = pools(world).run(sums, code, 20)
    for rank in found:
        assert rank["scattered"] < 1e-4
        assert rank["reduced"] < 1e-4
        assert 1e-3 < rank["residual"] < 1, "of one step, not of twenty"
        assert all(total == pytest.approx(20, rel=0.1) for total in rank["levels"][1:])
        assert rank["seen"], "a gradient that is not finite reaches its sum"
        assert rank["finite"], "and nothing of it is kept"
        assert rank["gathered"] == [float(1 + place) for place in range(world) for _ in range(300)]
    assert all(rank["everywhere"] == found[0]["everywhere"] for rank in found)


def collectives_of_a_step(argv: list[str], run_dir: str) -> dict[str, Any]:
    """What units gave to their reductions and gathers in a step, and what they got: arrays, call by call."""
    with started(argv, run_dir) as run:
        found: dict[str, Any] = {"reduced": [], "gathered": []}
        comms: list[Any] = []
        with contextlib.ExitStack() as undo:
            for kind, log in ((CodedUnitReduction, found["reduced"]), (CodedUnitGather, found["gathered"])):
                original = kind.__call__

                def noted(
                    self: Any,
                    output_tensor: Any,
                    input_tensor: Any,
                    *rest: Any,
                    call: Any = original,
                    log: Any = log,
                    **more: Any,
                ) -> Any:
                    comms.append(self)
                    given = input_tensor.float().cpu().numpy().copy()
                    result = call(self, output_tensor=output_tensor, input_tensor=input_tensor, **more)
                    log.append((id(self), given, output_tensor.float().cpu().numpy().copy()))
                    return result

                undo.callback(setattr, kind, "__call__", original)
                kind.__call__ = noted  # type: ignore[method-assign, assignment]
            run.engine.train_step(run.data_loader.next_step().batches)
        reductions = list(coded_reductions(run.engine.model_chunks))
        found["kept"] = all(each.errors for each in reductions)
        forget_errors(run.engine.model_chunks)
        found["forgotten"] = not any(each.errors for each in reductions)
    return found


def int8(rows: Any) -> Any:
    """What 8-bit codes of blocks of 128 say of [rows, numbers], from the definition."""
    count, size = rows.shape
    blocks = np.pad(rows, ((0, 0), (0, -size % 128))).reshape(count, -1, 128)
    mantissa, exponent = np.frexp(np.abs(blocks).max(-1, keepdims=True) / np.float32(127))
    scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    return (np.round(blocks / scale).clip(-127, 127) * scale).reshape(count, -1)[:, :size]


@pytest.mark.parametrize(("world", "group"), [(4, 2), slow(2, 1), slow(4, 1)])
def test_units_send_what_codes_and_residuals_say(pools: Pools, tmp_path: Path, world: int, group: int) -> None:
    """Codes are those of a numpy reference bit for bit; the second of two micro-batches sends what rounding took from
    the first.
    """
    argv = [*SMALL, "--no-save", *f"{FULL} {GRADIENTS} {WEIGHTS} --global-batch-size {2 * world}".split()]
    argv += ["--set", f"parallel.compress_group_size={group}"]
    ranks = pools(world).run(collectives_of_a_step, argv, str(tmp_path / "run"))
    assert all(rank["kept"] and rank["forgotten"] for rank in ranks)
    count, lost = world // group, [{} for _ in ranks]  # type: ignore[var-annotated]
    calls = [len(rank["reduced"]) for rank in ranks]
    assert calls == [calls[0]] * world
    assert len({unit for unit, *_ in ranks[0]["reduced"]}) * 2 == calls[0] >= 20
    assert len(ranks[0]["gathered"]) >= 20
    for call in range(calls[0]):
        given = np.stack([rank["reduced"][call][1].reshape(count, group, -1) for rank in ranks])
        sums = given.reshape(count, group, *given.shape[1:]).sum(1)  # of each node: [node, node, place, numbers]
        for index, rank in enumerate(ranks):
            node, place = divmod(index, group)
            unit, _, _ = rank["reduced"][call]
            wanted = sums[node, :, place] + lost[index].get(unit, 0.0)
            decoded = int8(wanted)
            kept = wanted - decoded
            kept[node] = 0.0
            rank["decoded"] = decoded
            lost[index][unit] = kept
        for index, rank in enumerate(ranks):
            node, place = divmod(index, group)
            parts = [ranks[other * group + place]["decoded"][node] for other in range(count)]
            parts[node] = sums[node, node, place]
            np.testing.assert_array_equal(rank["reduced"][call][2], np.sum(parts, axis=0, dtype=np.float32))
    for call in range(len(ranks[0]["gathered"])):
        shards = np.concatenate([int8(rank["gathered"][call][1][None])[0] for rank in ranks])
        for rank in ranks:
            np.testing.assert_array_equal(rank["gathered"][call][2], shards)


CLOSE = [
    (2, f"{GRADIENTS} {WEIGHTS}"),
    (2, f"{FULL} {GRADIENTS} {WEIGHTS}"),
]
SLOW = [
    (2, f"{GRADIENTS} --data-parallel-sharding none"),
    (4, f"{GRADIENTS} {WEIGHTS} --set parallel.compress_group_size=2"),
    (
        4,
        f"{FULL} {GRADIENTS} {WEIGHTS} --set parallel.compress_group_size=2 --secondary-shard-size 2 "
        "--global-batch-size 8",
    ),
    (4, f"--placement colocated --pp 2 {GRADIENTS} --set parallel.compress_group_size=2"),
    (2, f"--data-parallel-sharding optimizer_gradients {GRADIENTS} {WEIGHTS}"),
    (4, f"--tp 2 {FULL} --compress-gradients fp8 --compress-weights fp8 {BF16}"),
    (4, f"--cp 2 --recompute-granularity full {FULL} {GRADIENTS} {WEIGHTS}"),
    (2, f"{FULL} {GRADIENTS} {WEIGHTS} --offload optimizer parameters"),
    (2, f"{FULL} {GRADIENTS} {WEIGHTS} --freeze vision --lora-rank 4"),
    (4, f"{GRADIENTS} {WEIGHTS} --hybrid-shard-size 2"),
    (2, f"{GRADIENTS} {WEIGHTS} --no-overlap-grad-reduce --no-overlap-param-gather"),
    (2, f"{GRADIENTS} --set model.language.tie_embeddings=true"),
]


@pytest.mark.parametrize(("world", "flags"), fast_and_slow(CLOSE, SLOW))
def test_runs_are_close_to_exact_ones(pools: Pools, tmp_path: Path, world: int, flags: str) -> None:
    """Four steps: a wrong sum, or weights that differ between ranks, would change the norm by far more."""
    words = flags.split()
    exact = [*words, "--compress-gradients", "none", "--compress-weights", "none"]
    exact = [word.replace("compress_group_size=2", "compress_group_size=null") for word in exact]
    pools(world).run(train, [*LEAN, "--no-save", *words], str(tmp_path / "coded"))
    pools(world).run(train, [*LEAN, "--no-save", *exact], str(tmp_path / "exact"))
    coded, plain = metrics(tmp_path / "coded"), metrics(tmp_path / "exact")
    assert len(coded) == len(plain) == 4
    for ours, theirs in zip(coded, plain, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=3e-2)
    assert any(ours["grad_norm"] != theirs["grad_norm"] for ours, theirs in zip(coded, plain, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [GRADIENTS, "--compress-gradients fp8", WEIGHTS])
def test_200_steps_end_within_a_hundredth_of_exact(pools: Pools, tmp_path: Path, flags: str) -> None:
    exact = f"{flags} --compress-gradients none --compress-weights none"
    for name, words in (("exact", exact), ("coded", flags)):
        argv = [*TEXT_TO_LEARN, "--global-batch-size", "8", *words.split()]
        pools(2).run(train, argv, str(tmp_path / name))
    assert_within_a_hundredth(metrics(tmp_path / "coded"), metrics(tmp_path / "exact"))
