"""DiLoCo by hand: sites that train one after the other on one process, and an outer step between them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def built(argv: Sequence[str], run_dir: str) -> Iterator[Any]:
    """Train as the program does, on the ranks of this process group."""
    import torch.distributed as dist

    from megavlm import backend
    from megavlm.config.cli import parse
    from megavlm.config.rules import check
    from megavlm.parallel.groups import destroy_groups
    from megavlm.train.build import build
    from megavlm.train.loop import close

    config = parse([*argv, "--run-dir", run_dir])
    check(config, world=dist.get_world_size())
    destroy_groups()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = build(config, backend.activate())
    yield run
    close(run)


def trained_apart(argv: Sequence[str], run_dir: str, steps: int) -> tuple[dict[str, Tensor], float]:
    """The weights after so many steps, and the bytes that this rank has sent between sites."""
    with built(argv, run_dir) as run:
        for _ in range(steps):
            run.engine.train_step(run.data_loader.next_step().batches)
        run.engine.trained()
        return {name: p.detach().clone() for name, p in _weights(run).items()}, run.engine.outer.sent


def by_hand(
    argv: Sequence[str], run_dir: str, *, rounds: int, inner: int, sites: int, lr: float, momentum: float
) -> dict[str, Tensor]:
    """The weights after so many rounds of `inner` steps of each site, and an outer step each."""
    with built(argv, run_dir) as run:
        weights, optimizer = _weights(run), run.engine.optimizer.chained_optimizers[0].optimizer
        optimizer.begin()
        kept: list[Any] = [None] * sites
        velocity = {name: torch.zeros_like(p) for name, p in weights.items()}
        for _ in range(rounds):
            batches = [run.data_loader.next_step().batches for _ in range(inner)]
            begun = {name: p.detach().clone() for name, p in weights.items()}
            scheduled = run.engine.scheduler.num_steps
            ends = []
            for site in range(sites):
                run.engine.scheduler.num_steps = scheduled
                _restore(optimizer, kept[site])
                for name, p in weights.items():
                    p.data.copy_(begun[name])
                for batch in batches:
                    run.engine.train_step(batch[site::sites])
                kept[site] = _copy(optimizer)
                ends.append({name: p.detach().clone() for name, p in weights.items()})
            for name, p in weights.items():
                away = begun[name] - sum(end[name] for end in ends) / sites
                velocity[name] = momentum * velocity[name] + away
                p.data.copy_(begun[name] - lr * (away + momentum * velocity[name]))
        return {name: p.detach().clone() for name, p in weights.items()}


def _weights(run: Any) -> dict[str, Tensor]:
    return {name: p for name, p in run.engine.chunks[0].module.named_parameters() if p.requires_grad}


def _copy(optimizer: Any) -> Any:
    moments = {p: {kind: held.clone() for kind, held in state.items()} for p, state in optimizer.state.items()}
    return moments, [group.get("step", 0) for group in optimizer.param_groups]


def _restore(optimizer: Any, kept: Any) -> None:
    """Set moments and steps to a copy; to those of a new optimizer without one."""
    for p, state in optimizer.state.items():
        for kind, held in state.items():
            held.copy_(kept[0][p][kind] if kept else torch.zeros_like(held))
    for index, group in enumerate(optimizer.param_groups):
        group["step"] = kept[1][index] if kept else 0
