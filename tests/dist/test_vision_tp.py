"""Ranks that hold an encoder together stay alike in what each of them has whole, dropout or not."""

from __future__ import annotations

from pathlib import Path

from tests.support.pool import Pools
from tests.support.training import SMALL, started


def largest_difference(argv: list[str], run_dir: str) -> tuple[int, float]:
    """(parameters that both ranks have whole, how far they are apart after three steps)."""
    import torch
    import torch.distributed as dist

    from megavlm.train.loop import close

    run = started(argv, run_dir)
    for _ in range(3):
        run.engine.train_step(run.data_loader.next_step().batches)
    apart = []
    for param in run.engine.model_chunks[-1].parameters():
        if not getattr(param, "tensor_model_parallel", False):
            both = [torch.empty_like(param) for _ in range(2)]
            dist.all_gather(both, param.detach())
            apart.append(float((both[0] - both[1]).abs().max()))
    close(run)
    return len(apart), max(apart)


def test_dropout_keeps_the_ranks_of_an_encoder_alike(pools: Pools, tmp_path: Path) -> None:
    """Without sequence parallelism every rank drops the same of whole activations, and its own share of the heads'."""
    flags = "--no-save --pp 2 --placement colocated --vision-tp 2 --no-sequence-parallel"
    argv = [*SMALL, *flags.split(), *"--hidden-dropout 0.2 --attention-dropout 0.2".split()]
    for whole, difference in pools(2).run(largest_difference, argv, str(tmp_path)):
        assert whole > 20
        assert difference == 0
