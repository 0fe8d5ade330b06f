"""Data-parallel ranks that share optimizer state, gradients and weights: the numbers of one process, in less memory."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.support.covering import fast_and_slow, slow
from tests.support.flags import FOUR, MODELS, TWO
from tests.support.forked import context, run_program
from tests.support.pool import Pools
from tests.support.torchrun import TINY
from tests.support.training import LEAN, SMALL, THREE, assert_same_curve, metrics, started, train, without_wall_time

GRADIENTS, FULL = "--data-parallel-sharding optimizer_gradients", "--data-parallel-sharding full"

# (processes, model, flags): every sharding with TP, PP, frozen parts, tied copies, micro-batches of text, and clipping.
FAST = [
    (2, "one-image-rank", FULL),
    (4, "rich", f"--tp 2 {FULL} --set execution.loss_chunk_tokens=2"),
    (4, "rich", f"--pp 2 --vpp 2 {GRADIENTS} --set execution.loss_chunk_tokens=2"),
    (4, "plain", f"{FULL} --hybrid-shard-size 2"),
    (2, "rich", f"{FULL} --placement colocated"),
    (2, "frozen-vision", "--data-parallel-sharding optimizer --offload optimizer activations"),
    (2, "rich", f"{FULL} --offload optimizer parameters"),
    (2, "rich", "--offload optimizer=nvme:DISK"),
]
SLOW = [
    (4, "rich", "--hybrid-shard-size 2 --placement colocated"),
    (2, "llava-onevision", f"{FULL} --offload optimizer activations"),
    (2, "frozen-vision", GRADIENTS),
    (4, "learning-rates", f"--tp 2 --no-sequence-parallel {GRADIENTS}"),
    (4, "frozen-vision-projector", f"--pp 2 {FULL}"),
    (4, "plain", "--data-parallel-sharding optimizer --hybrid-shard-size 2"),
    # Each model meets each layout, in turn with ZeRO-2 and ZeRO-3: so both meet every layout, and every model.
    *[
        (world, model, f"{layout} {(GRADIENTS, FULL)[(place + turn) % 2]}")
        for turn, (world, layout) in enumerate([(4, "--tp 2"), (4, "--pp 2"), (2, "--placement colocated")])
        for place, model in enumerate(MODELS)
    ],
    (1, "rich", f"{FULL} --offload parameters optimizer activations"),
    (2, "frozen-vision", f"{FULL} --offload parameters optimizer=nvme:DISK --micro-batch-size 2"),
    (2, "recompute", f"{FULL} --placement colocated --offload parameters optimizer activations"),
    (4, "one-image-rank", f"{FULL} --hybrid-shard-size 2 --offload optimizer parameters"),
    (4, "rich", f"{FULL} --cp 2 --hybrid-shard-size 2 --placement colocated --vision-tp 2"),
    (4, "rich", f"{FULL} --secondary-shard-size 2 --offload optimizer parameters"),
    (4, "rich", f"--pp 2 --vpp 2 {FULL} --offload optimizer parameters"),
    (2, "plain", "--data-parallel-sharding none --offload optimizer"),
    (2, "rich", "--tp 2 --offload optimizer=nvme:DISK"),
    (2, "recompute", "--pp 2 --placement colocated --offload optimizer=nvme:DISK"),
    (2, "rich", "--pp 2 --vpp 2 --offload activations"),
    (2, "recompute", "--pp 2 --placement colocated --offload activations optimizer"),
]


@pytest.mark.parametrize(("world", "model", "flags"), fast_and_slow(FAST, SLOW))
def test_sharding_gives_the_numbers_of_one_process(pools, one_process, tmp_path, world, model, flags):
    argv = [*SMALL, *THREE, "--no-save", *MODELS[model].split(), *flags.replace("DISK", f"{tmp_path}/disk").split()]
    pools(world).run(train, argv, str(tmp_path))
    assert_same_curve(metrics(tmp_path), one_process(model))


@pytest.mark.slow
def test_bf16_follows_fp32(pools: Pools, one_process, tmp_path: Path):
    """As in test_parity: masters and sums are fp32, so that rounding is that of bf16 products alone."""
    for kind in ("optimizer_gradients", "full"):
        argv = [*SMALL, *THREE, "--no-save", "--precision", "bf16", "--data-parallel-sharding", kind]
        pools(2).run(train, argv, str(tmp_path / kind))
        for ours, exact in zip(metrics(tmp_path / kind), one_process("plain"), strict=True):
            assert abs(ours["loss"] - exact["loss"]) < 1e-2


def summed_over_ranks(argv: list[str], run_dir: str) -> dict[str, int]:
    """Bytes that this rank gives to sums over ranks in two steps, by type; small sums are of other things."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counted: dict[str, int] = {}

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func)
            if name.startswith("c10d.") and "reduce" in name:
                given = args[0] if "allreduce" in name else args[1]
                for each in given if isinstance(given, list | tuple) else [given]:
                    if each.numel() > 1000:
                        counted[str(each.dtype)] = counted.get(str(each.dtype), 0) + each.nbytes
            return func(*args, **(kwargs or {}))

    with started(argv, run_dir) as run, Sums():
        for _ in range(2):
            run.engine.train_step(run.data_loader.next_step().batches)
    return counted


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, "--data-parallel-sharding optimizer"),
        slow(2, FULL),
        slow(2, "--data-parallel-sharding none"),
        slow(4, "--hybrid-shard-size 2 --placement colocated --overlap-grad-reduce"),
    ],
)
def test_gradients_reduced_in_bf16_take_half_the_bytes(pools, one_process, tmp_path, world, flags):
    argv = [*SMALL, *THREE, "--no-save", "--precision", "bf16", *flags.split()]
    in_bf16 = [*argv, "--grad-reduce-in-bf16"]
    (whole,) = pools(world).run(summed_over_ranks, argv, str(tmp_path / "fp32"))[0].items()
    (half,) = pools(world).run(summed_over_ranks, in_bf16, str(tmp_path / "bf16"))[0].items()
    assert (whole[0], half) == ("torch.float32", ("torch.bfloat16", whole[1] // 2))
    pools(world).run(train, in_bf16, str(tmp_path / "run"))
    for ours, exact in zip(metrics(tmp_path / "run"), one_process("plain"), strict=True):
        assert abs(ours["loss"] - exact["loss"]) < 1e-2
        assert ours["grad_norm"] == pytest.approx(exact["grad_norm"], rel=2e-2)


SECONDARY = f"{FULL} --secondary-shard-size 2"


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        slow(4, "--cp 2 --recompute-granularity full"),
        slow(4, "--precision bf16 --freeze vision --lora-rank 4"),
        slow(8, "--pp 2 --vpp 2 --global-batch-size 16"),
        slow(8, "--hybrid-shard-size 4 --global-batch-size 8"),
    ],
)
def test_a_secondary_shard_changes_no_number(pools: Pools, tmp_path: Path, world: int, flags: str):
    argv = [*SMALL, "--no-save", *flags.split()]
    for name, sharding in (("whole", FULL), ("secondary", SECONDARY)):
        pools(world).run(train, [*argv, *sharding.split()], str(tmp_path / name))
    assert without_wall_time(metrics(tmp_path / "secondary")) == without_wall_time(metrics(tmp_path / "whole"))


def gathered(argv: list[str], run_dir: str) -> dict[int, int]:
    """Elements that a step gathers, by the number of ranks among which it does."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    counted: dict[int, int] = {}

    class Counter:
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
            counted[group.size()] = counted.get(group.size(), 0) + output_tensor.numel()
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    with started(argv, run_dir) as run:
        for chunk in run.engine.model_chunks:
            for module in chunk.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(Counter())  # type: ignore[arg-type]
        run.engine.train_step(run.data_loader.next_step().batches)
    return counted


def test_backward_passes_gather_inside_the_node(pools: Pools, tmp_path: Path):
    argv = [*SMALL, "--no-save", "--global-batch-size", "8"]
    whole = pools(4).run(gathered, [*argv, *FULL.split()], str(tmp_path / "whole"))[0]
    inside = pools(4).run(gathered, [*argv, *SECONDARY.split()], str(tmp_path / "inside"))[0]
    assert whole.keys() == {4}
    assert inside == {4: whole[4] // 2, 2: whole[4] // 2}


def standing_bytes(argv: list[str], run_dir: str) -> int:
    """Bytes of weights, gradients and optimizer state on this rank after a step."""
    from tests.support.live_bytes import LiveBytes, standing_tensors

    with started(argv, run_dir) as run:
        run.engine.train_step(run.data_loader.next_step().batches)
        return LiveBytes(standing_tensors(run.engine)).live


def test_ranks_that_share_hold_less(pools: Pools, tmp_path: Path):
    """Two ranks, bf16: 18 bytes a parameter without sharding, 12 of state halved, 4 of gradients halved, all halved."""
    argv = [*SMALL, "--no-save", "--precision", "bf16"]
    size = {
        kind: max(pools(2).run(standing_bytes, [*argv, "--data-parallel-sharding", kind], str(tmp_path / kind)))
        for kind in ("none", "optimizer", "optimizer_gradients", "full")
    }
    parameters = size["none"] / 18
    # Between steps gathered weights are gone in both; rows that two ranks cannot halve, and padding, are the tolerance.
    assert size["optimizer"] == pytest.approx(12 * parameters, rel=0.03)
    assert size["optimizer_gradients"] == pytest.approx(8 * parameters, rel=0.03)
    assert size["full"] == pytest.approx(8 * parameters, rel=0.03)


def build_bytes(argv: list[str], run_dir: str) -> tuple[int, int, int]:
    """Return the peak of bytes while a rank builds an engine, those of its rows, and those of the largest part."""
    from megavlm.arch.dims import dims_of
    from megavlm.arch.plan import make_plan
    from megavlm.train.build_engine import build_engine
    from tests.support.live_bytes import LiveBytes, standing_tensors

    with started(argv, run_dir) as run:
        plan = make_plan(run.config, dims_of(run.config, world=2))
        [chunk] = run.engine.chunks
        rows = LiveBytes(standing_tensors(run.engine)).live
        names = [[name for name in chunk.layouts if name.startswith(f"{part}.")] for part in chunk.module.parts]
        largest = max(sum(4 * prod(chunk.layouts[name].shape) for name in part) for part in names)
        building = {"vocab_size": run.source.vocab_size, "backend": run.backend}
        with LiveBytes([]) as counter:
            again = build_engine(run.config, plan, run.engine.groups, **building)
        again.close()
    return counter.peak, rows, largest


def test_a_model_is_never_whole_while_it_is_built(pools: Pools, tmp_path: Path):
    """With 12 layers the rows of two ranks are 7 times the largest part, and a whole model 14 times."""
    argv = [*SMALL, "--no-save", "--set", "model.language.num_layers=12", *FULL.split()]
    for peak, rows, largest in pools(2).run(build_bytes, argv, str(tmp_path)):
        assert rows > 7 * largest
        assert peak <= rows + largest


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-3), slow("fp32", 1e-5)])
def test_adapters_train_in_frozen_layers_that_ranks_share(pools, tmp_path, precision, tolerance):
    """bf16: a layer's frozen weights are shared in bf16 and its adapters in fp32, gathered together."""
    argv = [*LEAN, "--no-save", "--lora-rank", "4", "--freeze", "vision", "--precision", precision]
    for kind in ("optimizer", "full"):
        pools(2).run(train, [*argv, "--data-parallel-sharding", kind], str(tmp_path / kind))
    for ours, theirs in zip(metrics(tmp_path / "full"), metrics(tmp_path / "optimizer"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=10 * tolerance)


BF16 = "--precision bf16"


def on_disk(argv: list[str], folder: Path) -> list[str]:
    return [*argv, "--offload", f"optimizer=nvme:{folder}"]


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, BF16),
        slow(2, f"--tp 2 {BF16}"),
        slow(2, f"{BF16} --data-parallel-sharding full"),
        slow(2, f"{BF16} --placement colocated --pp 2"),
        slow(2, "--precision fp16"),
    ],
)
def test_a_resumed_run_is_bit_for_bit_that_of_host_memory(pools: Pools, tmp_path: Path, world: int, flags: str) -> None:
    argv = [*LEAN, *flags.split()]
    pools(world).run(train, [*argv, *FOUR, "--offload", "optimizer"], str(tmp_path / "host"))
    for length in (TWO, FOUR):
        pools(world).run(train, on_disk([*argv, *length], tmp_path / "disk"), str(tmp_path / "halves"))
    assert without_wall_time(metrics(tmp_path / "halves")) == without_wall_time(metrics(tmp_path / "host"))
    assert not list((tmp_path / "disk").iterdir()), "files without a name"


@pytest.mark.slow
def test_it_resumes_on_another_layout(pools: Pools, one_process, tmp_path: Path) -> None:
    """Moments of two data-parallel ranks' disks, read by tensor-parallel ones into memory, and back."""
    argv = [*SMALL, "--train-iters"]
    pools(2).run(train, on_disk([*argv, "2"], tmp_path / "disk"), str(tmp_path / "run"))
    pools(2).run(train, [*argv, "3", "--tp", "2"], str(tmp_path / "run"))
    pools(2).run(train, on_disk([*argv, "4", "--pp", "2"], tmp_path / "disk"), str(tmp_path / "run"))
    assert_same_curve(metrics(tmp_path / "run"), one_process("plain", ["--train-iters", "4"]))


def run_until_full(argv: list[str], output: str, writes: int) -> None:
    """Run the program on a disk that has no room after so many writes of a step."""
    import errno
    import os

    write, left = os.pwritev, [writes]

    def full(*arguments: object) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)  # type: ignore[arg-type]

    os.pwritev = full  # type: ignore[assignment]
    run_program(argv, output)


@pytest.mark.slow
def test_a_disk_that_gets_full_ends_the_run_in_one_line_and_loses_nothing(pools: Pools, tmp_path: Path) -> None:
    argv = [*TINY, "--train-iters", "4", "--save-interval", "1"]
    pools(1).run(train, argv, str(tmp_path / "whole"))
    with_disk = [*on_disk(argv, tmp_path / "disk"), "--run-dir", str(tmp_path / "run")]
    process = context().Process(target=run_until_full, args=(with_disk, str(tmp_path / "output"), 200))
    process.start()
    process.join()
    output = (tmp_path / "output").read_text()
    assert process.exitcode == 1, output
    (line,) = (line for line in output.splitlines() if line.startswith("pretrain_vlm.py: "))
    assert "No space left on device" in line
    assert "Traceback" not in output
    assert 0 < len(metrics(tmp_path / "run")) < 4, "the disk was full in the middle"
    pools(1).run(train, on_disk(argv, tmp_path / "disk"), str(tmp_path / "run"))
    assert without_wall_time(metrics(tmp_path / "run")) == without_wall_time(metrics(tmp_path / "whole"))
