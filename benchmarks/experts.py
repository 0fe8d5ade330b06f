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

LAYERS, WIDTH, FFN, EXPERTS, TOPK, SEQUENCES = 4, 128, 512, 8, 2, 2
MODEL = (
    f"--train-iters 2 --global-batch-size {SEQUENCES} --micro-batch-size 1 --no-tensorboard --no-save "
    f"--placement colocated --language-num-layers {LAYERS} --language-hidden-size {WIDTH} "
    f"--language-ffn-hidden-size {FFN} --language-num-attention-heads 4 --language-vocab-size 512 "
)
MIXTURE = (
    f"--num-experts {EXPERTS} --moe-router-topk {TOPK} --moe-ffn-hidden-size {FFN // TOPK} "
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
        with tempfile.TemporaryDirectory() as folder:
            peaks, seconds, sent = zip(*pools(world).run(step, argv, folder, timeout=3600), strict=True)
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
    group: Any = run.engine.groups.collection.ep

    def counted(received: Any, outgoing: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        if kwargs["group"] is group:
            splits = list(kwargs["input_split_sizes"])
            others = sum(splits) - splits[group.rank()]
            sent += others * outgoing[:1].numel() * outgoing.element_size()
        return exchange(received, outgoing, *args, **kwargs)

    begin = time.process_time()
    with patch.object(dist, "all_to_all_single", counted):
        run.engine.train_step(batches)
    seconds = time.process_time() - begin
    close(run)
    return peak, seconds, sent


if __name__ == "__main__":
    main()
