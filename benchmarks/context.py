"""Compare context parallelism with one process: memory and processor time of the busier rank, and bytes exchanged.

    python benchmarks/context.py [--tokens 8192 32768] [--quick]

A small language model with a colocated encoder trains on one sequence per step, in processes of this machine. Memory is
that of live tensors at the peak of a step; times are processor times of a step, which other work changes little. Bytes
are those that attention's all-to-alls send to other ranks in a step, beside the formula in docs/architecture.md. A run
appends to `benchmarks/records/context.jsonl`, unless `--quick`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import append, circumstances

from tests.support.pool import Pools

LAYERS, HEADS, GROUPS, WIDTH = 4, 8, 4, 16
MODEL = (
    "--train-iters 2 --global-batch-size 1 --micro-batch-size 1 --no-tensorboard --no-save --placement colocated "
    f"--language-num-layers {LAYERS} --language-hidden-size {HEADS * WIDTH} --language-ffn-hidden-size 256 "
    f"--language-num-attention-heads {HEADS} --language-num-query-groups {GROUPS} --language-vocab-size 512 "
    "--images-per-sample 4 --recompute-granularity none"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="lengths of the sequence")
    parser.add_argument("--quick", action="store_true", help="1,024 tokens; no record")
    options = parser.parse_args()
    pools, record = Pools(), dict[str, Any](circumstances())
    for tokens in [1024] if options.quick else options.tokens:
        record[str(tokens)] = found = {cp: measured(pools, tokens, cp) for cp in (1, 2, 4)}
        for cp, row in found.items():
            print(
                f"{tokens} tokens, CP {cp}: {row['bytes'] / found[1]['bytes']:.2f} of the memory, "
                f"{row['seconds'] / found[1]['seconds']:.2f} of the time, busiest rank {row['imbalance']:.2f} of the "
                f"mean, {row['sent']:,} bytes sent, {row['formula']:,} by the formula",
                flush=True,
            )
    pools.close()
    if not options.quick:
        append("context", record)


def measured(pools: Pools, tokens: int, cp: int) -> dict[str, float]:
    """Return the largest peak memory, processor time and bytes sent over all ranks, and largest over mean time."""
    argv = [*MODEL.split(), "--seq-length", str(tokens), "--cp", str(cp)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = pools(cp).run(step, argv, folder, timeout=3600)
    peaks, seconds, sent = zip(*ranks, strict=True)
    return {
        "bytes": max(peaks),
        "seconds": max(seconds),
        "imbalance": max(seconds) / (sum(seconds) / cp),
        "sent": max(sent),
        "formula": formula(tokens, cp),
    }


def formula(tokens: int, cp: int) -> int:
    """Return the bytes that a rank sends in a step: forward and backward, fp32, before and after attention."""
    return LAYERS * 2 * tokens // cp * (2 * HEADS + 2 * GROUPS) * WIDTH * 4 * (cp - 1) // cp


def step(argv: list[str], run_dir: str) -> tuple[int, float, int]:
    """Return this rank's peak bytes of a step, the processor seconds of another one, and the bytes that it sends."""
    import torch.distributed as dist

    from megavlm import backend
    from megavlm.config.cli import parse
    from megavlm.config.rules import check
    from megavlm.parallel.groups import destroy_groups
    from megavlm.train.build import build
    from megavlm.train.loop import close
    from tests.support.live_bytes import step_counts

    config = parse([*argv, "--run-dir", run_dir])
    check(config, world=dist.get_world_size())
    destroy_groups()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = build(config, backend.activate())
    batches = run.data_loader.next_step().batches
    peak = step_counts(run.engine, batches).peak
    sent, exchange = 0, dist.all_to_all_single

    def counted(received: Any, outgoing: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        if not args and kwargs.get("output_split_sizes") is None:  # features of images have uneven parts
            ranks = kwargs["group"].size()
            sent += outgoing.numel() * outgoing.element_size() * (ranks - 1) // ranks
        return exchange(received, outgoing, *args, **kwargs)

    begin = time.process_time()
    with patch.object(dist, "all_to_all_single", counted):
        run.engine.train_step(batches)
    seconds = time.process_time() - begin
    close(run)
    return peak, seconds, sent


if __name__ == "__main__":
    main()
