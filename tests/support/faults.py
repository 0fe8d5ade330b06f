"""Faults in the numbers of a run, as cases put them in: at one step, on one rank, in pixels, a layer or a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from tests.support.training import train


@dataclass(frozen=True)
class Fault:
    """`value` in what `kind` says ("pixels", "output" or "gradient" of the layer `name`), whenever a batch is trained
    on in one of the `iterations`, on a rank (None: on all). A finite value multiplies all of it, others one number."""

    kind: str
    iterations: tuple[int, ...]
    rank: int | None = None
    name: str = ""
    value: float = math.nan
    passes: int = 2  # 1: not when the batch is computed again


@contextmanager
def injected(fault: Fault) -> Iterator[None]:
    """Within it, runs that this process starts have the fault."""
    import torch.distributed as dist

    from megavlm.pipeline.schedule import Schedule
    from megavlm.train.engine import Engine

    here = fault.rank is None or dist.get_rank() == fault.rank
    steps = passes = 0
    run_batches = Schedule.train

    def counted(step: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            return step(*args, **kwargs)

        return call

    def faulty(self: Schedule, batches: Sequence[Any]) -> Any:
        nonlocal passes
        passes += steps in fault.iterations
        if not here or steps not in fault.iterations or passes > fault.passes * len(fault.iterations):
            return run_batches(self, batches)
        if fault.kind == "pixels":
            for batch in batches:
                held = batch.images
                if held is not None and not held.patches.is_meta and len(held.patches):
                    held.patches[0, 0] = fault.value
            return run_batches(self, batches)
        chunks = [*self.chunks, *([self.colocated.encoder.module] if self.colocated is not None else [])]
        modules = dict(pair for chunk in chunks for pair in getattr(chunk, "module", chunk).named_modules())
        if fault.name not in modules:  # another stage has it
            return run_batches(self, batches)
        hook = modules[fault.name].register_forward_hook(_poison(fault))
        try:
            return run_batches(self, batches)
        finally:
            hook.remove()

    with (
        patch.object(Engine, "train_step", counted(Engine.train_step)),
        patch.object(Engine, "leave_out", counted(Engine.leave_out)),
        patch.object(Schedule, "train", faulty),
    ):
        yield


def _poison(fault: Fault) -> Any:
    def poison(module: Any, inputs: Any, output: Any) -> Any:
        tensor = output[0] if isinstance(output, tuple) else output
        factor = torch.full_like(tensor, fault.value if math.isfinite(fault.value) else 1.0)
        factor.view(-1)[0] = fault.value
        if fault.kind == "output":
            changed = tensor * factor
            return (changed, *output[1:]) if isinstance(output, tuple) else changed
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradient * factor)
        return None

    return poison


def train_with(argv: Sequence[str], run_dir: str, fault: Fault) -> str:
    """`train` with a fault. Returns the line of a run that ends by its numbers, else nothing."""
    from megavlm.errors import BadNumbers

    with injected(fault):
        try:
            train(argv, run_dir)
        except BadNumbers as error:
            return str(error)
    return ""
