"""Devices that compute or store wrongly are found and named, and looking for them changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megavlm.resilience.events import events
from megavlm.resilience.status import read_status
from tests.support.faults import Fault, train_with
from tests.support.flags import DROPOUT
from tests.support.forked import context, run_program, status_of
from tests.support.pool import Pools
from tests.support.training import SMALL, metrics, train, without_wall_time

SHORT = (
    "--lr-warmup-iters 1 --train-iters 4 --no-save --set model.vision.num_layers=2 model.language.num_layers=4".split()
)
TWICE = "--set numerics.verify_micro_batch_interval=2".split()
COPIES = "--set numerics.check_weight_hash_across_dp_replicas_interval=1".split()


@contextmanager
def before_step(number: int, act: Callable[[Any], None]) -> Iterator[None]:
    """Within it, `act` is called with the chunks before the passes of a step (from 1) of the next run."""
    from megavlm.pipeline.schedule import Schedule

    steps = 0
    run_batches = Schedule.train

    def train_step(self: Schedule, batches: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == number:
            act([*self.chunks, *([self.colocated.encoder.module] if self.colocated is not None else [])])
        return run_batches(self, batches)

    with patch.object(Schedule, "train", train_step):
        yield


def flip(values: torch.Tensor) -> None:
    """Flip a low bit of the largest number."""
    flat = values.detach().view(-1)
    whole = {4: torch.int32, 2: torch.int16}[values.element_size()]
    flat.view(whole)[flat.abs().argmax()] ^= 1 << 3


def train_or_end(argv: list[str], run_dir: str) -> str:
    return train_with(argv, run_dir, Fault("pixels", ()))


def train_with_a_wrong_result(
    argv: list[str],
    run_dir: str,
    rank: int,
    name: str,
    gradient: bool,
    run: Callable[[list[str], str], Any] = train_or_end,
) -> Any:
    """A run in which a module's output, or the gradient of it, has a wrong bit once, on one rank in step 2."""
    import torch.distributed as dist

    def wrong_once(chunks: Any) -> None:
        modules = {key: module for chunk in chunks for key, module in getattr(chunk, "module", chunk).named_modules()}
        if dist.get_rank() == rank:
            hook = modules[name].register_forward_hook(lambda module, inputs, output: wrong(output))

            def wrong(output: Any) -> None:
                hook.remove()
                value = output[0] if isinstance(output, tuple) else output
                if gradient:
                    value.register_hook(lambda found: flipped(found))
                else:
                    flip(value)

    def flipped(found: torch.Tensor) -> torch.Tensor:
        flip(found := found.clone())
        return found

    with before_step(2, wrong_once):
        return run(argv, run_dir)


LAYOUTS = [
    (4, "--tp 2 --pp 2 --vpp 2", 3, "language.layers.3.mlp.linear_fc1", False),
    pytest.param(
        4,
        "--tp 2 --pp 2",
        1,
        "language.layers.0.self_attention.core_attention",
        True,
        marks=pytest.mark.slow,
    ),
    (2, "--placement colocated --data-parallel-sharding none", 1, "vision.layers.1", False),
    (2, "--data-parallel-sharding full", 0, "language.layers.1.mlp.linear_fc1", True),
]


@pytest.mark.parametrize(("world", "layout", "rank", "name", "gradient"), LAYOUTS)
def test_a_wrong_result_is_found_where_it_is_computed(
    pools: Pools, tmp_path: Path, world: int, layout: str, rank: int, name: str, gradient: bool
) -> None:
    argv = [*SMALL, *SHORT, *DROPOUT, *TWICE, *layout.split()]
    ends = pools(world).run(train_with_a_wrong_result, argv, str(tmp_path), rank, name, gradient)
    what = f"the gradient of the output of {name}" if gradient else f"the output of {name}"
    assert all(f"iteration 2: rank {rank} computed {what} twice with different results" in end for end in ends), ends
    [event] = [event for event in events(tmp_path) if event["kind"] == "mismatch"]
    assert (event["culprits"], event["module"], event["iteration"]) == ([rank], what, 2)
    assert len(event["hosts"]) == 1


def test_the_program_ends_with_status_71(tmp_path: Path) -> None:
    run_dir, output = tmp_path / "run", tmp_path / "output"
    argv = [*SMALL, *SHORT, *TWICE, "--run-dir", str(run_dir)]
    wrong = (argv, str(output), 0, "projector", False, run_program)
    process = context().Process(target=train_with_a_wrong_result, args=wrong)
    process.start()
    assert status_of(process) == 71, output.read_text()
    (line,) = [line for line in output.read_text().splitlines() if line.startswith("pretrain_vlm.py: ")]
    assert "iteration 2: rank 0 computed the output of projector" in line
    assert read_status(run_dir)["reason"] in line


UNCHANGED = [
    (2, "--pp 2 --vpp 2 --recompute-granularity full"),
    (2, "--tp 2 --placement colocated --micro-batch-size 2"),
    pytest.param(2, "--data-parallel-sharding full --offload activations", marks=pytest.mark.slow),
    pytest.param(
        2,
        "--data-parallel-sharding optimizer_gradients --precision bf16 --fp8 hybrid --fp8-recipe delayed",
        marks=pytest.mark.slow,
    ),
    (2, "--freeze vision --lora-rank 4 --precision fp16 --global-batch-size 2"),
]


@pytest.mark.parametrize(("world", "layout"), UNCHANGED)
def test_computing_twice_leaves_nothing_behind(pools: Pools, tmp_path: Path, world: int, layout: str) -> None:
    argv = [*SMALL, *SHORT, *DROPOUT, *layout.split()]
    pools(world).run(train, argv, str(tmp_path / "plain"))
    pools(world).run(train, [*argv, *TWICE], str(tmp_path / "checked"))
    assert without_wall_time(metrics(tmp_path / "checked")) == without_wall_time(metrics(tmp_path / "plain"))


def train_with_a_flipped_bit(argv: list[str], run_dir: str, rank: int, kind: str, name: str) -> str:
    """A run in which a bit of a weight or of a moment flips on a rank, between the update of step 2 and step 3."""
    import torch.distributed as dist

    from megavlm.optim.master_weights import held_state
    from megavlm.train.engine import Engine

    steps = 0
    train_step = Engine.train_step

    def flipping(self: Engine, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        params = {key: each for chunk in self.model_chunks for key, each in chunk.module.named_parameters()}
        if steps == 3 and dist.get_rank() == rank and name in params:
            flip(dict(held_state(self.optimizer))[params[name]][kind] if kind else params[name].data)
        return train_step(self, *args, **kwargs)

    with patch.object(Engine, "train_step", flipping):
        return train_or_end(argv, run_dir)


THREE = "--global-batch-size 3 --data-parallel-sharding none --images-per-sample 1 0 2".split()
FLIPS = [
    (3, [*THREE], 1, "", "language.norm.weight", "rank 1 differs from the others in language.norm.weight"),
    (
        3,
        [*THREE, "--precision", "bf16"],
        2,
        "exp_avg_sq",
        "projector.linear_fc1.weight",
        "rank 2 differs from the others",
    ),
    (2, "--tp 2".split(), 1, "", "language.norm.weight", "ranks 0 and 1 differ in language.norm.weight"),
    (2, "--tp 2 --pp 1".split(), 0, "exp_avg", "language.norm.weight", "ranks 0 and 1 differ in the first moment of"),
    (
        4,
        "--data-parallel-sharding optimizer --hybrid-shard-size 2 --precision bf16".split(),
        2,
        "param",
        "language.norm.weight",
        "ranks 0 and 2 differ in the fp32 weights of language.norm.weight",
    ),
]


@pytest.mark.parametrize(("world", "layout", "rank", "kind", "name", "line"), FLIPS)
def test_copies_that_differ_are_named(
    pools: Pools, tmp_path: Path, world: int, layout: list[str], rank: int, kind: str, name: str, line: str
) -> None:
    argv = [*SMALL, *SHORT, *COPIES, *layout]
    ends = pools(world).run(train_with_a_flipped_bit, argv, str(tmp_path), rank, kind, name)
    assert all(f"iteration 3: {line}" in end for end in ends), ends
    [event] = [event for event in events(tmp_path) if event["kind"] == "mismatch"]
    assert rank in event["culprits"]
