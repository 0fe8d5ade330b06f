"""Measure a step of embedding training by batch size: memory, and what the gradient cache's forward pass costs.

    python benchmarks/contrastive.py [--quick]

A small VLM trains on synthetic pairs with `--objective contrastive` in two processes of this machine, each batch size
in processes of its own. Memory is what a step adds to the resident set of the busier one: activations, gradients,
representations, scores, and data, those of the next step too, which are prefetched. Tensors of data are told apart. The
smallest batch has two micro-batches per process, as gradients of a second one need memory beside those of the first.
Times are processor times of a step and of its two passes. Backward takes twice what forward does, so with one forward
pass more 4/3 of the second pass is expected. A run appends to `benchmarks/records/contrastive.jsonl`, unless `--quick`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import append, circumstances

from tests.support.pool import Pools

PAIRS_PER_PASS = 32  # --micro-batch-size
MODEL = (
    f"--objective contrastive --micro-batch-size {PAIRS_PER_PASS} --seq-length 32 --no-tensorboard --no-save "
    "--train-iters 3 --set model.vision.image_size=16 model.vision.patch_size=4 model.projector.pixel_shuffle=2 "
    "model.vision.num_layers=2 model.vision.hidden_size=64 model.vision.ffn_hidden_size=128 "
    "model.language.num_layers=4 model.language.hidden_size=128 model.language.ffn_hidden_size=384 "
    "model.language.num_attention_heads=4 model.language.vocab_size=512 --images-per-sample 1 "
    "--data-parallel-sharding none"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="128 and 256 pairs; no record")
    options = parser.parse_args()
    sizes = (128, 256) if options.quick else (128, 512, 4096)
    record = dict[str, Any](circumstances())
    for pairs in sizes:
        pools = Pools()
        with tempfile.TemporaryDirectory() as folder:
            argv = [*MODEL.split(), "--global-batch-size", str(pairs), "--run-dir", folder]
            found = pools(2).run(measured, argv, timeout=3600)
        pools.close()
        added, data, first, second, whole = (max(values) for values in zip(*found, strict=True))
        record[f"{pairs} pairs"] = {"bytes": added, "data": data, "first": first, "second": second, "step": whole}
        print(
            f"{pairs:,} pairs: {added / 2**20:,.0f} MiB, {data / 2**20:,.0f} of them data, "
            f"processor time {whole:.1f} s, {whole / second:.2f} × that without the cache's forward pass",
            flush=True,
        )
    if not options.quick:
        append("contrastive", record)


def measured(argv: Sequence[str]) -> tuple[int, int, float, float, float]:
    """Return the bytes that the first step adds to this process, those of the data of two steps, and the processor
    seconds of the second step: of its first pass, of its second one, and in all.
    """
    import resource

    import psutil
    import torch.distributed as dist

    from megavlm import backend
    from megavlm.command_line.parsing import parse
    from megavlm.parallel.groups import destroy_groups
    from megavlm.pipeline.schedule import Schedule
    from megavlm.rules.check import check
    from megavlm.train.build import build
    from megavlm.train.loop import close

    config = parse(argv)
    check(config, world=dist.get_world_size())
    destroy_groups()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = build(config, backend.activate())
    before = psutil.Process().memory_info().rss
    batches = run.data_loader.next_step().batches
    data = 2 * sum(tensor.nbytes for batch in batches for tensor in batch.host_tensors().values())
    run.engine.train_step(batches)
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    seconds: list[float] = []
    once = Schedule._pass

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        found = once(*args, **kwargs)
        seconds.append(time.process_time() - begin)
        return found

    batches = run.data_loader.next_step().batches
    begin = time.process_time()
    with patch.object(Schedule, "_pass", timed):
        run.engine.train_step(batches)
    whole = time.process_time() - begin
    close(run)
    return added, data, seconds[0], seconds[1], whole


if __name__ == "__main__":
    main()
