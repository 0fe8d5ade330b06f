"""Compare context parallelism with one process: memory and processor time of the busier rank, and bytes exchanged.

    python benchmarks/context.py [--tokens 8192 32768] [--quick]

A small language model with a colocated encoder trains on one sequence per step, in processes of this machine. Memory is
that of live tensors at the peak of a step; times are processor times of a step, which other work changes little. Bytes
are those that attention's all-to-alls send to other ranks in a step, beside the formula in docs/architecture.md.
A run appends to `benchmarks/records/context.jsonl`, unless `--quick`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from rank_step import ranks_of
from record import append, circumstances

from tests.support.pool import Pools

LAYERS, HEADS, GROUPS, WIDTH = 4, 8, 4, 16
MODEL = (
    "--train-iters 2 --global-batch-size 1 --micro-batch-size 1 --no-tensorboard --no-save --placement colocated "
    f"--set model.language.num_layers={LAYERS} model.language.hidden_size={HEADS * WIDTH} "
    f"model.language.ffn_hidden_size=256 model.language.num_attention_heads={HEADS} "
    f"model.language.num_query_groups={GROUPS} model.language.vocab_size=512 --images-per-sample 4 "
    "--recompute-granularity none"
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
    peaks, seconds, sent = ranks_of(pools, cp, argv, sent_by_attention)
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


def sent_by_attention(groups: Any, outgoing: Tensor, options: Mapping[str, Any]) -> int:
    """Return the bytes that an exchange of heads sends to others; 0 for features of images, whose parts are uneven."""
    if options.get("output_split_sizes") is not None:
        return 0
    ranks = options["group"].size()
    return outgoing.numel() * outgoing.element_size() * (ranks - 1) // ranks


if __name__ == "__main__":
    main()
