"""Compare AdamW, Muon and Lion: step time, memory, bytes exchanged; and the loss of the demo by steps and by FLOPs.

    python benchmarks/optimizers.py [--quick]

A small model trains on one process and on two (ZeRO-1), with each optimizer. Memory is that of live tensors at the peak
of a step; times are processor times of a step, of the busier rank. Bytes are those that a rank sends to others for
Muon's matrices in a step, beside the formula. Then the demo trains for half of its steps with AdamW and with Muon, from
the same weights on the same batches, at the demo's learning rate, twice and four times it. A run appends to
`benchmarks/records/optimizers.jsonl`, unless `--quick`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from rank_step import ranks_of
from record import append, circumstances

from megavlm.arch.kinds import kind_in
from megavlm.arch.layers import layer_names
from megavlm.command_line.parsing import parse
from megavlm.config.optimizer_schema import newton_schulz_flops
from megavlm.config.schema import OptimizerConfig
from megavlm.rules.defaults import resolve
from tests.support.pool import Pools
from tests.support.training import metrics, train

OPTIMIZERS = ("adamw", "muon", "lion")
MODEL = (
    "--train-iters 9 --global-batch-size 4 --micro-batch-size 2 --no-tensorboard --no-save --seq-length 128 --set "
    "model.vision.num_layers=4 model.vision.hidden_size=192 model.vision.ffn_hidden_size=512 "
    "model.language.num_layers=6 model.language.hidden_size=256 model.language.ffn_hidden_size=768 "
    "model.language.num_attention_heads=4 model.language.vocab_size=1024"
)
DEMO = "--recipe demo --train-iters 260 --lr-warmup-iters 25 --lr-wsd-decay-iters 110 --no-save --no-tensorboard"
STEPS, RATES = 260, (1.5e-3, 3e-3, 6e-3)
EVERY = 20  # steps whose losses are averaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 steps of the demo; no record")
    quick = parser.parse_args().quick
    pools, record = Pools(), dict[str, Any](circumstances())
    with tempfile.TemporaryDirectory() as folder:
        record["steps"] = {str(world): measured(pools, world) for world in (1, 2)}
        record["demo"] = curves(pools, folder, steps=EVERY if quick else STEPS)
    pools.close()
    if not quick:
        append("optimizers", record)


def measured(pools: Pools, world: int) -> dict[str, dict[str, float]]:
    """Return the figures of each optimizer on so many processes: of the rank with the most."""
    found = {}
    for kind in OPTIMIZERS:
        peaks, seconds, sent = ranks_of(pools, world, [*MODEL.split(), "--optimizer", kind], sent_for_matrices)
        found[kind] = {"bytes": max(peaks), "seconds": max(seconds), "sent": max(sent)}
    found["muon"]["formula"] = (
        2 * 4 * sum(rows * columns for rows, columns in shapes(MODEL)) / world / world * (world - 1)
    )
    for kind, row in found.items():
        ratios = [row[name] / found["adamw"][name] for name in ("seconds", "bytes")]
        print(
            f"{world} processes, {kind}: {ratios[0]:.2f} of AdamW's time, {ratios[1]:.3f} of its peak memory, "
            f"{row['sent']:,} bytes sent, {row.get('formula', 0):,.0f} by the formula",
            flush=True,
        )
    return found


def sent_for_matrices(groups: Any, outgoing: Tensor, options: Mapping[str, Any]) -> int:
    """Return the bytes that an exchange of matrices sends to others; 0 for all other exchanges."""
    if outgoing.dtype is not torch.uint8:
        return 0
    sizes = options["input_split_sizes"]
    return int(sum(sizes) - sizes[options["group"].rank()])


def shapes(flags: str) -> list[tuple[int, int]]:
    """Return rows and columns of all matrices of a run's model."""
    model = resolve(parse(flags.split())).model
    weights = (kind_in(model, name).hidden_weights(model).values() for name in layer_names(model))
    return [shape for held in weights for weight in held for shape in weight.shapes()]


def curves(pools: Pools, folder: str, *, steps: int) -> dict[str, Any]:
    """Return mean losses of the demo with both optimizers at each learning rate, and FLOPs of a step and of Muon's."""
    found: dict[str, Any] = {"every": EVERY}
    for kind in ("adamw", "muon"):
        for rate in RATES:
            run_dir = str(Path(folder) / f"{kind}-{rate}")
            argv = [*DEMO.split(), "--optimizer", kind, "--lr", str(rate)]
            if steps < STEPS:
                argv += f"--train-iters {steps} --lr-warmup-iters 2 --lr-wsd-decay-iters 8".split()
            pools(1).run(train, argv, run_dir, timeout=3600)
            records = metrics(run_dir)
            losses = [record["loss"] for record in records]
            means = [statistics.fmean(losses[at : at + EVERY]) for at in range(0, steps, EVERY)]
            found[f"{kind} at {rate:g}"] = means
            print(f"demo, {kind} at {rate:g}: {' '.join(f'{mean:.3f}' for mean in means)}", flush=True)
    found["step_flops"] = 1e12 * records[-1]["model_tflops_per_device"] * records[-1]["step_time_s"]
    options = OptimizerConfig(muon_num_ns_steps=5)
    found["newton_schulz_flops"] = sum(newton_schulz_flops(options, *each) for each in shapes(DEMO))
    print(f"Newton-Schulz adds {found['newton_schulz_flops'] / found['step_flops']:.2%} to the FLOPs of a step")
    return found


if __name__ == "__main__":
    main()
