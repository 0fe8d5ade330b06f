"""Measure steps of two data-parallel processes over a slow link: gradients and weights as they are, and as codes.

    python benchmarks/links.py [--quick]

Two gloo processes on one machine train the same model through the program's own path. After each collective over which
they share gradients or weights, both sleep for as long as a link of the given rate takes for the bytes that the rank
sends: the throttle is these sleeps, not a network. A ring's share is counted for exact collectives, (n − 1)/n of the
tensor, and the codes themselves for coded ones. Nothing overlaps on either side (`--no-overlap-grad-reduce`,
`--no-overlap-param-gather`; ZeRO-3's collectives wait on a CPU), so a network that overlaps gains less. `seconds` is
the median of steps after the first.
Appends to `benchmarks/records/links.jsonl`, unless `--quick`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import append, circumstances

from tests.support.pool import Pools

WORLD = 2
MODEL = (
    "--global-batch-size 4 --micro-batch-size 2 --seq-length 64 --no-tensorboard --no-save --train-iters 100 "
    "--precision bf16 --no-overlap-grad-reduce --no-overlap-param-gather --set model.vision.num_layers=2 "
    "model.vision.hidden_size=64 model.vision.ffn_hidden_size=128 model.vision.num_attention_heads=4 "
    "model.vision.image_size=16 model.vision.patch_size=4 model.projector.pixel_shuffle=2 "
    "model.language.num_layers=4 model.language.hidden_size=256 model.language.ffn_hidden_size=768 "
    "model.language.num_attention_heads=4 model.language.vocab_size=8192 --images-per-sample 1"
)
SIDES = {
    "exact": "",
    "gradients bf16": "--compress-gradients bf16",
    "gradients int8": "--compress-gradients int8",
    "gradients and weights int8": "--compress-gradients int8 --compress-weights int8",
    "gradients and weights fp8": "--compress-gradients fp8 --compress-weights fp8",
    "ZeRO-3, exact": "--data-parallel-sharding full",
    "ZeRO-3, gradients and weights int8": "--data-parallel-sharding full --compress-gradients int8 "
    "--compress-weights int8",
}
RATES = {"1 Gbit/s": 125e6, "100 Mbit/s": 12.5e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one rate and two steps; no record")
    quick = parser.parse_args().quick
    record: dict[str, Any] = {**circumstances(), "rates": {}}
    pools = Pools()
    for name, rate in list(RATES.items())[: 1 if quick else None]:
        record["rates"][name] = {}
        for side, flags in SIDES.items():
            with tempfile.TemporaryDirectory() as folder:
                argv = [*MODEL.split(), *flags.split(), "--run-dir", folder]
                ranks = pools(WORLD).run(steps, argv, rate, 2 if quick else 6)
            sent, seconds, parameters = ranks[0]
            record["parameters"] = parameters
            record["rates"][name][side] = {"megabytes": sent / 1e6, "seconds": seconds}
            print(f"{name}, {side}: {sent / 1e6:.2f} MB and {seconds:.2f} s a step, {parameters:,} parameters")
    if not quick:
        append("links", record)


def steps(argv: Sequence[str], rate: float, count: int) -> tuple[float, float, int]:
    """Return the bytes that this rank sends in a step, the median seconds of steps, and the number of parameters."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    from megavlm import backend
    from megavlm.command_line.parsing import parse
    from megavlm.parallel.groups import destroy_groups
    from megavlm.rules.check import check
    from megavlm.train.build import build
    from megavlm.train.loop import close

    config = parse(argv)
    check(config, world=dist.get_world_size())
    destroy_groups()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = build(config, backend.activate())
    link = _Link(rate)
    with contextlib.ExitStack() as stack:
        for module, name, share in (
            (buffers, "dist_reduce_scatter_func", scattered),
            (buffers, "dist_all_gather_func", gathered),
            (dist, "all_to_all_single", scattered),
            (dist, "all_gather_into_tensor", gathered),
            (dist, "all_gather_single", gathered),  # what `fully_shard` calls, by the version of torch
            (dist, "reduce_scatter_single", scattered),
            (dist, "reduce_scatter_tensor", scattered),
            (dist, "all_reduce", lambda ranks: 2 * scattered(ranks)),
        ):
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, link.throttled(getattr(module, name), share)))
        seconds = []
        for number in range(1 + count):
            if number == 1:
                link.sent = 0.0
            batches = run.data_loader.next_step().batches
            dist.barrier()
            began = time.perf_counter()
            run.engine.train_step(batches)
            seconds.append(time.perf_counter() - began)
    parameters = sum(p.numel() for chunk in run.engine.chunks for p in chunk.parameters())
    close(run)
    return link.sent / len(seconds[1:]), statistics.median(seconds[1:]), parameters


def scattered(ranks: int) -> float:
    """Return the share of its input that a rank sends to the others."""
    return (ranks - 1) / ranks


def gathered(ranks: int) -> float:
    """Return how often a rank's input is sent until all have it, in a ring."""
    return ranks - 1


class _Link:
    """Counts bytes, and sleeps for as long as a link of this rate takes for them."""

    def __init__(self, rate: float) -> None:
        self.rate, self.sent = rate, 0.0

    def throttled(self, call: Callable[..., Any], share: Callable[[int], float]) -> Callable[..., Any]:
        """Return a collective of whose input, the last tensor it is given, each of n ranks sends `share(n)`."""

        def slow(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            values = [*args, *(kwargs[name] for name in ("output", "input", "group") if name in kwargs)]
            given = [value for value in values if isinstance(value, torch.Tensor)][-1]
            groups = [value for value in values if isinstance(value, dist.ProcessGroup)]
            size = share(dist.get_world_size(*groups)) * given.numel() * given.element_size()
            self.sent += size
            time.sleep(size / self.rate)
            return result

        return slow


if __name__ == "__main__":
    main()
