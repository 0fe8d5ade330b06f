"""Measure one step of a layout on each rank: live bytes at its peak, processor time, bytes that it sends."""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

from torch import Tensor

from tests.support.pool import Pools

STEPS = 5  # that are timed

# A rank's groups, a tensor that it gives to an all-to-all, and the keywords of that call → bytes to other ranks.
Sent = Callable[[Any, Tensor, Mapping[str, Any]], int]


def ranks_of(pools: Pools, world: int, argv: Sequence[str], sent: Sent) -> tuple[tuple[Any, ...], ...]:
    """Return peak bytes of a step, the median of the processor seconds of others, and bytes sent, each of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        return tuple(zip(*pools(world).run(_step, [*argv, "--run-dir", folder], sent, timeout=3600), strict=True))


def _step(argv: Sequence[str], sent: Sent) -> tuple[int, float, int]:
    import torch.distributed as dist

    from megavlm import backend
    from megavlm.command_line.parsing import parse
    from megavlm.parallel.groups import destroy_groups
    from megavlm.rules.check import check
    from megavlm.train.build import build
    from megavlm.train.loop import close
    from tests.support.live_bytes import step_counts

    config = parse(argv)
    check(config, world=dist.get_world_size())
    destroy_groups()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = build(config, backend.activate())
    batches = run.data_loader.next_step().batches
    peak = step_counts(run.engine, batches).peak
    total, exchange = 0, dist.all_to_all_single

    def counted(received: Tensor, outgoing: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal total
        if not args:
            total += sent(run.engine.groups, outgoing, kwargs)
        return exchange(received, outgoing, *args, **kwargs)

    with patch.object(dist, "all_to_all_single", counted):
        run.engine.train_step(batches)
    seconds = []
    for _ in range(STEPS):
        begin = time.process_time()
        run.engine.train_step(batches)
        seconds.append(time.process_time() - begin)
    close(run)
    return peak, statistics.median(seconds), total
