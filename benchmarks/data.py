"""Measure packing and balance: the share of positions that hold tokens, and the load of 32 simulated ranks.

    .venv/bin/python benchmarks/data.py [--ranks 32] [--seq-length 8192] [--steps 20]

Lengths have a long tail, like those of visual instruction data: text of log-normal length (median 200 tokens), none to
eight images of native resolution, 64 to 2,500 tokens each. Each packer sees the same samples, in windows of
`--packing-window`; naive padding puts each sample into a sequence of its own. Costs are forward FLOPs of Qwen2.5-VL-7B,
for vision and language separately. `before` assigns sequences round-robin, `after` as a run does. Images are those of
`data_images.py`, in one size; the wait for data is `data_time_s` of a run's metrics. Appends to
`benchmarks/records/data.jsonl`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import data_images
import numpy as np
from record import append, circumstances

from megavlm.arch.packing import assign, imbalance, pack
from megavlm.config.schema import DataConfig
from megavlm.data.costs import CostModel
from megavlm.data.loader import costs_of
from megavlm.data.sampler import PackedBatchSampler, Windows, window_of
from megavlm.data.types import EncodedRecord, EncodedSample
from megavlm.families import published_model

MERGE = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--sequences-per-rank", type=int, default=8, help="micro-batches × micro-batch size")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--packing-window", type=int, default=DataConfig().packing_window)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-images", action="store_true", help="do not measure image processing")
    options = parser.parse_args()
    record: dict[str, Any] = {**circumstances(), "arguments": vars(options)}
    record |= packing(options)
    record |= balance(options)
    if not options.no_images:
        print("images, JPEG and pixels to patches (benchmarks/data_images.py has all sizes)")
        record["images"] = data_images.table(data_images.SIZES[:1], repeats=5)
    append("data", record)


def sample(item: int, *, seq_length: int) -> EncodedRecord:
    """Return sample `item` of a long-tailed data set."""
    rng = np.random.default_rng(item)
    text = int(np.clip(rng.lognormal(5.3, 1.0), 16, 4096))
    images = int(rng.choice([0, 1, 2, 4, 8], p=[0.2, 0.6, 0.1, 0.06, 0.04]))
    grids = []
    for _ in range(images):
        area = np.clip(rng.lognormal(5.8, 0.8), 64, 2500) / max(images / 2, 1)
        rows = max(1, round(np.sqrt(area * rng.uniform(0.5, 2))))
        grids.append((rows * MERGE, max(1, round(area / rows)) * MERGE))
    features = sum(rows * columns // MERGE**2 for rows, columns in grids)
    length = min(text + features, seq_length)
    cost = COSTS.cost(length=length, grids=grids, images=images)
    nothing = np.empty(0, dtype=np.int64)
    return EncodedRecord((EncodedSample(nothing, nothing.astype(bool), (), (), 0, cost),), sample_id=item)


COSTS = CostModel.of(published_model("qwen2_5_vl_7b"))


def packing(options: argparse.Namespace) -> dict[str, Any]:
    """Return the share of positions that hold tokens, over the samples of twenty windows."""
    size, capacity = options.packing_window, options.seq_length
    windows = [
        [sample(item, seq_length=capacity).samples[0].cost.length for item in range(start, start + size)]
        for start in range(0, 20 * size, size)
    ]
    packers: dict[str, Callable[[Sequence[int], int], Any]] = {
        "naive padding": lambda lengths, _: [[item] for item in range(len(lengths))],
        "in order": next_fit,
        "first fit": first_fit,
        "best fit, decreasing (ours)": pack,
    }
    result = {}
    print(f"useful tokens in sequences of {capacity}, windows of {size} samples (worst window)")
    for name, packer in packers.items():
        began = time.perf_counter()
        counts = [len(packer(lengths, capacity)) for lengths in windows]
        seconds = (time.perf_counter() - began) / len(windows)
        shares = [sum(lengths) / (count * capacity) for lengths, count in zip(windows, counts, strict=True)]
        total = sum(map(sum, windows)) / (sum(counts) * capacity)
        result[name] = {"useful": total, "worst_window": min(shares)}
        print(f"  {name:28} {total:7.2%} ({min(shares):.2%})   {1000 * seconds:.1f} ms a window")
    return {"packing": result}


def next_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack samples in order; close a sequence when the next sample does not fit."""
    bins: list[list[int]] = [[]]
    for item, length in enumerate(lengths):
        if sum(lengths[other] for other in bins[-1]) + length > capacity:
            bins.append([])
        bins[-1].append(item)
    return bins


def first_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    """Pack samples in order, each into the first sequence with enough free positions."""
    rooms: list[int] = []
    for length in lengths:
        for number, room in enumerate(rooms):
            if room >= length:
                rooms[number] -= length
                break
        else:
            rooms.append(capacity - length)
    return rooms


def balance(options: argparse.Namespace) -> dict[str, Any]:
    """Return the largest load over the mean load of the ranks, averaged over steps."""
    size, ranks, places = options.packing_window, options.ranks, options.sequences_per_rank
    sampler = PackedBatchSampler(
        lambda number: window_of(
            [sample(i, seq_length=options.seq_length) for i in range(number * size, (number + 1) * size)],
            seq_length=options.seq_length,
            packing=True,
        ),
        count=ranks * places,
        windows=Windows(size),
        seq_length=options.seq_length,
    )
    in_turn = [list(range(rank, ranks * places, ranks)) for rank in range(ranks)]
    found: dict[str, list[tuple[float, float]]] = {"before": [], "after": []}
    place, seconds = sampler.start, 0.0
    for _ in range(options.steps):
        batch = sampler.batch_at(place)
        place = batch.after
        costs = costs_of(batch.sequences)
        assert costs is not None
        began = time.perf_counter()
        assigned = assign(costs, ranks)
        seconds += time.perf_counter() - began
        for name, dealt in (("before", in_turn), ("after", assigned)):
            found[name].append((imbalance(costs[:, 0], dealt), imbalance(costs[:, 1], dealt)))
    sampler.close()
    print(f"load over {ranks} ranks of {places} sequences, largest / mean: mean of {options.steps} steps (worst step)")
    result = {}
    for name, values in found.items():
        vision, language = np.array(values).T
        result[name] = {
            "vision": float(vision.mean()),
            "vision_worst": float(vision.max()),
            "language": float(language.mean()),
            "language_worst": float(language.max()),
        }
        print(
            f"  {name:7} vision {vision.mean():.3f} ({vision.max():.3f})   "
            f"language {language.mean():.3f} ({language.max():.3f})"
        )
    print(f"  {1000 * seconds / options.steps:.0f} ms a step to assign")
    return {"imbalance": result}


if __name__ == "__main__":
    main()
