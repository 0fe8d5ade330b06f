"""Compare a mixture of experts with a dense model of the same active FLOPs: memory, processor time, bytes exchanged.

    python benchmarks/experts.py [--quick]

A small language model with a colocated encoder trains in processes of this machine: dense, as a mixture whose tokens
take 2 of 8 experts of half the width, and so on two ranks that share the experts (`--ep 2`). All experts are loaded
alike (`--moe-router-force-load-balancing`). Memory is that of live tensors at the peak of a step; times are processor
times of a step, of the busier rank. Bytes are those that a rank's all-to-alls send to the other rank, beside the
formula. A run appends to `benchmarks/records/experts.jsonl`, unless `--quick`.
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

LAYERS, WIDTH, FFN, EXPERTS, TOPK, SEQUENCES = 4, 128, 512, 8, 2, 2
MODEL = (
    f"--train-iters 2 --global-batch-size {SEQUENCES} --micro-batch-size 1 --no-tensorboard --no-save "
    f"--placement colocated --set model.language.num_layers={LAYERS} model.language.hidden_size={WIDTH} "
    f"model.language.ffn_hidden_size={FFN} model.language.num_attention_heads=4 model.language.vocab_size=512 "
)
MIXTURE = (
    f"--num-experts {EXPERTS} --set model.experts.router_topk={TOPK} model.experts.ffn_hidden_size={FFN // TOPK} "
    "--moe-router-force-load-balancing"
)
CASES = {"dense": (1, ""), "mixture": (1, MIXTURE), "dense, DP 2": (2, ""), "mixture, EP 2": (2, f"{MIXTURE} --ep 2")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="256 tokens; no record")
    options = parser.parse_args()
    tokens = 256 if options.quick else 4096
    pools, record = Pools(), dict[str, Any](circumstances())
    for name, (world, flags) in CASES.items():
        argv = [*MODEL.split(), *flags.split(), "--seq-length", str(tokens)]
        peaks, seconds, sent = ranks_of(pools, world, argv, sent_to_experts)
        expected = formula(tokens, ranks=world if "mixture" in name else 1)
        record[name] = {"bytes": max(peaks), "seconds": max(seconds), "sent": max(sent), "formula": expected}
        print(
            f"{name}: {max(peaks):,} bytes, {max(seconds):.2f} s, {max(sent):,} bytes sent, "
            f"{expected:,} by the formula",
            flush=True,
        )
    pools.close()
    if not options.quick:
        append("experts", record)


def formula(tokens: int, *, ranks: int) -> int:
    """Return the bytes that a rank sends in a step: each token's hidden states to its experts and back, and the weights
    of its experts there; backward the same. Of SEQUENCES / ranks rows, (ranks − 1) / ranks of the tokens go elsewhere.
    """
    rows = tokens * SEQUENCES // ranks * TOPK * (ranks - 1) // ranks
    return LAYERS * 2 * rows * (2 * WIDTH + 1) * 4


def sent_to_experts(groups: Any, outgoing: Tensor, options: Mapping[str, Any]) -> int:
    """Return the bytes that an exchange among the ranks of experts sends to others; 0 for all other exchanges."""
    group = groups.collection.ep
    if options["group"] is not group:
        return 0
    splits = list(options["input_split_sizes"])
    others = int(sum(splits) - splits[group.rank()])
    return others * outgoing[:1].numel() * outgoing.element_size()


if __name__ == "__main__":
    main()
