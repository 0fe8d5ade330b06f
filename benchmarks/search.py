"""Measure how long the planner's search takes, for 64 and for 1,024 devices.

    .venv/bin/python benchmarks/search.py [--gpus 64 1024]

One process with one thread ranks the layouts of Qwen2.5-VL-72B on H100s (8,192 tokens, six images of 1,008 pixels) and
appends the seconds by the clock and of processor time to `records/search.jsonl`. No part of the model is built.
"""

from __future__ import annotations

import argparse
import time

import record

from megavlm.config.schema import Config, DataConfig, PrecisionConfig, TrainConfig
from megavlm.families import published_model
from megavlm.planner.hardware import profile
from megavlm.planner.search import search

MODEL, GPU, SEQUENCE, IMAGES, SIDE = "qwen2_5_vl_72b", "h100", 8192, 6, 1008


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 1024])
    for gpus in parser.parse_args().gpus:
        found = {**record.circumstances(), "model": MODEL, "gpu": GPU, "gpus": gpus, **measure(gpus)}
        record.append("search", found)
        print(
            f"{gpus:,} GPUs: {found['layouts']:,} layouts, {found['simulated']} simulated, {found['seconds']:.1f} s "
            f"({found['processor_seconds']:.1f} s of processor time); the fastest: {found['fastest']}"
        )


def measure(gpus: int) -> dict[str, int | float | str]:
    """Return the times of one search."""
    train = TrainConfig(seq_length=SEQUENCE, global_batch_size=8 * gpus)
    data = DataConfig(kind="synthetic", image_sizes=(SIDE,), images_per_sample=(IMAGES,))
    config = Config(model=published_model(MODEL), precision=PrecisionConfig("bf16"), train=train, data=data)
    clock, processor = time.perf_counter(), time.process_time()
    outcome = search(config, gpus, profile(GPU))
    return {
        "seconds": time.perf_counter() - clock,
        "processor_seconds": time.process_time() - processor,
        "layouts": outcome.tried,
        "simulated": outcome.simulated,
        "fastest": outcome.best[0].candidate.label,
    }


if __name__ == "__main__":
    main()
