"""Compare steps of uneven micro-batches with what the planner simulates of their mean, and of each of them.

    python benchmarks/uneven.py [--write]

Sequences of Qwen2.5-VL-7B hold 0 to 6 images. Cuts are chosen for the mean micro-batch, and for a window of four steps,
as the planner does with a run's data. As in `benchmarks/schedules.py` the program's own runtime trains a small model
whose passes sleep as long as the planner says, each micro-batch for itself. A run appends to
`benchmarks/records/uneven.jsonl`; --write puts the records' table into docs/reports/predictions.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from record import append, circumstances
from schedules import MODEL, train_asleep
from tables import with_table

from megavlm.arch.dims import Dims
from megavlm.arch.scenario import Recompute, scenario_of
from megavlm.arch.schedules import Durations, PipelineShape, simulate
from megavlm.arch.workload import as_workload
from megavlm.config.schema import Config, DataConfig, ExecutionConfig, PrecisionConfig, TrainConfig
from megavlm.data.survey import STEPS, data_window
from megavlm.data.synthetic import SyntheticSource
from megavlm.families import published_model
from megavlm.planner.hardware import PROFILES, for_precision
from megavlm.planner.layer_profiles import LayerProfiles, layer_profiles
from megavlm.planner.partition import Partition, best_partition
from megavlm.planner.uneven import micro_batches
from megavlm.rules.defaults import resolve
from tests.support.pool import Pools
from tests.support.training import SMALL

PAGE = Path(__file__).parents[1] / "docs" / "reports" / "predictions.md"
RECORDS = Path(__file__).parent / "records" / "uneven.jsonl"
SHAPES = [PipelineShape("1f1b", 2, 1, 8), PipelineShape("1f1b", 4, 1, 8), PipelineShape("zb-h1", 4, 1, 8)]
SHARES = {0: 0.3, 1: 0.3, 2: 0.2, 4: 0.1, 6: 0.1}  # of sequences with so many images of 1,008 × 1,008 pixels
MODE: Recompute = "none"
ROUNDS = 1
MEAN = 0.8  # seconds that a forward pass sleeps in the mean: short ones last as long as the small model takes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="write the records' table into docs/reports/predictions.md"
    )
    if parser.parse_args().write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    pools, record = Pools(), dict[str, Any](circumstances())
    for shape in SHAPES:
        record[f"PP{shape.pp} m={shape.micro_batches} {shape.schedule}"] = figures(pools, shape)
    pools.close()
    append("uneven", record)
    print(table([record]))


def page(text: str) -> str:
    """Return the page with the table of all records."""
    records = [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]
    return with_table(text, "uneven", table(records))


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the table of records: of each case the fastest step, as other work only adds to it."""
    rows = [
        "| stages, micro-batches | cuts for | mean ÷ measured | window ÷ measured | step, simulated | measured |",
        "|---|---|---|---|---|---|",
    ]
    for case in records[0]:
        if case.startswith("PP"):
            found = {
                name: min((record[case][name] for record in records), key=lambda each: each["measured"])
                for name in ("mean", "window")
            }
            for name, each in found.items():
                ratios = [f"{each[way] / each['measured']:.3f}" for way in ("even", "uneven")]
                gains = [f"{each[way] / found['mean'][way] - 1:+.1%}" for way in ("uneven", "measured")]
                rows.append("| " + " | ".join([case, f"the {name}", *ratios, *gains]) + " |")
    return "\n".join(rows)


def figures(pools: Pools, shape: PipelineShape) -> dict[str, dict[str, float]]:
    """Return the seconds of a step with cuts for the mean micro-batch and with cuts for the window: as simulated with
    equal micro-batches and with those of the window, and measured, in the mean over the window's steps.
    """
    even, uneven = profiles_of(shape)
    found = {}
    for name, profiles in (("mean", even), ("window", uneven)):
        best = best_partition(profiles, shape, simulations=20)
        assert isinstance(best, Partition)
        alike, each = (durations_of(every, best.cuts, shape) for every in (even, uneven))
        slower = MEAN / alike.forward.mean()
        alike, each = (
            Durations(*(slower * times for times in (every.forward, every.backward, every.weight)))
            for every in (alike, each)
        )
        found[name] = {
            "even": simulate(shape, alike).seconds,
            "uneven": simulate(shape, each).seconds,
            "measured": measured(pools, shape, each),
        }
    return found


def profiles_of(shape: PipelineShape) -> tuple[LayerProfiles, LayerProfiles]:
    """Return the layers of the mean micro-batch, and those of a window of them."""
    images = np.random.default_rng(1).choice(list(SHARES), size=STEPS * shape.micro_batches, p=list(SHARES.values()))
    config = resolve(
        Config(
            model=published_model(MODEL),
            precision=PrecisionConfig(dtype="bf16"),
            execution=ExecutionConfig(transformer_impl="torch"),
            train=TrainConfig(seq_length=8192, global_batch_size=shape.micro_batches),
            data=DataConfig(kind="synthetic", images_per_sample=tuple(images.tolist()), image_sizes=(1008,)),
        ),
        vocab_size=256,
    )
    window = data_window(config, SyntheticSource(config), records=len(images))
    batches = micro_batches(window, dp=1, cp=1, size=1, colocated=False)
    hardware, scenario = for_precision(PROFILES["h100"], "bf16"), scenario_of(config, Dims(pp=shape.pp), on_gpu=True)
    mean = replace(scenario, work=as_workload(batches.work.mean(axis=(1, 2, 3))))
    uneven = layer_profiles(replace(scenario, work=batches.largest), hardware, modes=(MODE,), batches=batches)
    return layer_profiles(mean, hardware, modes=(MODE,)), uneven


def durations_of(profiles: LayerProfiles, cuts: tuple[int, ...], shape: PipelineShape) -> Durations:
    return profiles.durations([(a, b, MODE) for a, b in pairwise((0, *cuts, profiles.count))], [], shape=shape)


def measured(pools: Pools, shape: PipelineShape, durations: Durations) -> float:
    """Return the seconds of a step in the mean over those of the window, each the fastest of `ROUNDS`, as other work on
    the machine only adds to it; the first step of all is not counted.
    """
    count, schedule = ROUNDS * STEPS + 1, shape.schedule
    argv = [*SMALL, "--no-save", "--train-iters", str(count), "--pp", str(shape.pp), "--schedule", schedule]
    argv += ["--global-batch-size", str(shape.micro_batches)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = pools(shape.pp).run(train_asleep, argv, folder, durations, timeout=600)
    spans = []
    for step in range(1, count):
        slept = [each for rank in ranks for each in rank[step * len(rank) // count : (step + 1) * len(rank) // count]]
        spans.append(max(end for _, end in slept) - min(begin for begin, _ in slept))
    return float(np.array(spans).reshape(ROUNDS, STEPS).min(axis=0).mean())


if __name__ == "__main__":
    main()
