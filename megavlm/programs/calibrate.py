"""Measure this machine for the planner: `torchrun --nproc-per-node 2 -m megavlm calibrate --out mine.json`.

Start as many processes as a training run will have. Each process times the layers of small models of several widths
and lengths, the optimizer and an all-gather. The rates of `megavlm/planner/cost.py` are fitted to these times.
Use the result with `megavlm plan … --profile mine.json` or `pretrain_vlm.py --plan auto --hardware mine.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megavlm.command_line.commands import Parser, count, reported
from megavlm.command_line.configuration import configured
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.files import write_out
from megavlm.world import world_of

# (width, head count, tokens of text, image side in patches, vocabulary): small, long and wide
SIZES = (
    (128, 4, 128, 8, 512),
    (128, 4, 1024, 32, 512),  # attention takes longer than the linear layers
    (256, 4, 512, 16, 2048),
    (384, 6, 256, 16, 4096),
    (512, 8, 512, 12, 8192),
)
# Sizes for a GPU, where smaller layers would measure kernel launches only. The largest takes 12 GB with its optimizer.
GPU_SIZES = (
    (1024, 8, 2048, 24, 8192),
    (1024, 8, 16384, 96, 8192),
    (2048, 16, 4096, 48, 16384),
    (2048, 16, 16384, 48, 16384),
    (3072, 24, 16384, 48, 32768),
)


@reported("calibrate")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument is wrong (reported in one line)."""
    calibrate(_parser().parse_args(argv))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Measure this machine's rates and write them as a hardware profile.")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="Write the profile to this file.")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="Data type of the measured layers."
    )
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="Measurements of each size per round.")
    parser.add_argument(
        "--rounds",
        type=count,
        default=3,
        metavar="N",
        help="Rounds over all sizes; medians over rounds cancel slow drifts of speed.",
    )
    return parser


def config_of(size: tuple[int, int, int, int, int], precision: str, run_dir: str, *, processes: int) -> Config:
    """Return the configuration of a VLM with two vision and two language layers of the given size."""
    width, heads, tokens, patches, vocabulary = size
    run = (
        f"--seq-length {max(tokens, patches**2 + 64)} --global-batch-size {processes} --precision {precision} "
        "--data synthetic --lr 1e-5 --no-tensorboard --run-dir"
    )
    model = (
        f"vision.num_layers=2 vision.hidden_size={width} vision.ffn_hidden_size={4 * width} "
        f"vision.num_attention_heads={heads} vision.image_size={8 * patches} "
        f"language.num_layers=2 language.hidden_size={width} language.ffn_hidden_size={3 * width} "
        f"language.num_attention_heads={heads} language.vocab_size={vocabulary}"
    )
    words = [*run.split(), run_dir, "--set", *(f"model.{each}" for each in model.split())]
    return configured(words, world=processes)


def calibrate(options: argparse.Namespace) -> None:
    if options.out.is_dir():
        raise UserError(f"--out {options.out} is a folder: name a file")
    place = world_of(os.environ)
    if place.world_size > 1:
        os.environ.update(place.environment())  # srun and mpirun set other variables than torchrun
    world = place.world_size
    from megavlm import backend as backends

    backend = backends.activate()
    import torch.distributed as dist

    from megavlm.train.calibration import measured_hardware

    sizes = SIZES if backend.is_cpu else GPU_SIZES
    with tempfile.TemporaryDirectory() as folder:
        configs = [config_of(size, options.precision, folder, processes=world) for size in sizes]
        hardware, summary = measured_hardware(
            configs,
            backend,
            repeats=options.repeats,
            rounds=options.rounds,
            processes_per_node=place.local_world_size or world,
        )
    first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    if first:
        write_out("--out", options.out, json.dumps(asdict(hardware), indent=2) + "\n")
        print(summary)
