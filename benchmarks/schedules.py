"""Compare what schedules leave idle with what the planner simulates: GPipe, 1F1B, interleaved 1F1B, ZB-H1.

    python benchmarks/schedules.py [--quick]

The passes are those of Qwen2.5-VL-7B on H100s, as the planner predicts them for torch's layers (8,192 tokens, four
images, the fastest cuts of each schedule), slowed down. The program trains a small model with its own runtime, messages
and order of passes, and each pass sleeps until it has taken that long: so processes need no cores of their own, and
what is measured is how passes wait for one another, not how fast this machine computes. The pipeline's time lies
between a step's first pass and its last; that in which a rank runs no pass is its bubble.

A run appends to `benchmarks/records/schedules.jsonl`, unless `--quick`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import gantt
from record import append, circumstances

from megavlm.arch.dims import Dims, ScheduleName
from megavlm.arch.scenario import scenario_of
from megavlm.arch.schedules import Durations, PipelineShape, Times, simulate
from megavlm.config.schema import Config, DataConfig, ExecutionConfig, ParallelConfig, PrecisionConfig, TrainConfig
from megavlm.families import published_model
from megavlm.planner.hardware import PROFILES, for_precision
from megavlm.planner.layer_profiles import layer_profiles
from megavlm.planner.partition import Partition, best_partition
from tests.support.pool import Pools
from tests.support.training import SMALL, train

DOCUMENT = Path(__file__).parents[1] / "docs" / "reports" / "predictions.md"
RECORDS = Path(__file__).parent / "records" / "schedules.jsonl"
MODEL, MEAN = "qwen2_5_vl_7b", 0.25  # seconds that a forward pass sleeps in the mean
SCHEDULES: dict[ScheduleName, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1}  # with their VPP
Slept = tuple[float, float]  # beginning and end of a pass, by the machine's clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two stages, two micro-batches; no record")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw four stages' timelines, measure nothing")
    parser.add_argument(
        "--write", action="store_true", help="write the records' table into docs/reports/predictions.md"
    )
    options = parser.parse_args()
    if options.write:
        DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
        return
    if options.picture is not None:
        draw(options.picture)
        return
    quick = options.quick
    pools, record = Pools(), dict[str, Any](circumstances())
    print("case                     schedule     simulated  measured    against 1F1B: simulated  measured")
    for pp in (2,) if quick else (2, 4):
        for micro_batches in (pp,) if quick else (pp, 4 * pp):
            for frozen in (False,) if quick else (False, True):
                case = f"PP{pp} m={micro_batches}{' frozen tower' if frozen else ''}"
                record[case] = found = {
                    name: figures(pools, PipelineShape(name, pp, vpp, micro_batches), frozen=frozen)
                    for name, vpp in SCHEDULES.items()
                }
                for name, each in found.items():
                    base = found["1f1b"]
                    gains = [each[side] / base[side] - 1 for side in ("simulated_s", "measured_s")]
                    print(
                        f"{case:24} {name:12} {each['simulated']:8.1%} {each['measured']:9.1%} {gains[0]:26.1%} "
                        f"{gains[1]:9.1%}",
                        flush=True,
                    )
    pools.close()
    if not quick:
        append("schedules", record)


def documented(page: str) -> str:
    """Return the page with the table of all records: of each case the fastest step, as other work only adds to it."""
    records = [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]
    idle = [f"| idle time | {' | '.join(SCHEDULES)} |", "|---" * (1 + len(SCHEDULES)) + "|"]
    for case in (name for name in records[0] if name.startswith("PP")):
        found = (
            min((record[case][name] for record in records), key=lambda each: each["measured_s"]) for name in SCHEDULES
        )
        shown = [f"{each['measured']:.1%} ({each['simulated']:.1%})" for each in found]
        idle.append(f"| {case} | {' | '.join(shown)} |")
    before, _, rest = page.partition("<!-- table -->\n")
    table = "\n".join(idle)
    return f"{before}<!-- table -->\n{table}\n<!-- end -->" + rest.partition("<!-- end -->")[2]


def draw(path: Path) -> None:
    """Draw one step of each schedule, simulated, one below the other."""
    drawn, top = [], 0
    for name, vpp in SCHEDULES.items():
        shape = PipelineShape(name, 4, vpp, 4)
        timeline = simulate(shape, durations_of(shape, frozen=False), keep_events=True)
        picture = gantt.svg(timeline, title=name, top=top).replace('width="100%"', f'height="{gantt.height(timeline)}"')
        drawn.append(picture)
        top += gantt.height(timeline)
    box = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {gantt.WIDTH} {top}">'
    path.write_text("\n".join([box, *drawn, "</svg>\n"]))


def figures(pools: Pools, shape: PipelineShape, *, frozen: bool) -> dict[str, float]:
    """Return the bubble and the seconds of a pipeline's step, simulated and measured."""
    durations = durations_of(shape, frozen=frozen)
    expected = simulate(shape, durations)
    count = 4 if shape.micro_batches > shape.pp else 9  # steps, the first of which is not counted
    argv = [*SMALL, "--no-save", "--train-iters", str(count), "--pp", str(shape.pp), "--vpp", str(shape.vpp)]
    argv += ["--global-batch-size", str(shape.micro_batches), "--schedule", shape.schedule]
    with tempfile.TemporaryDirectory() as folder:
        ranks = pools(shape.pp).run(train_asleep, argv, folder, durations, timeout=600)
    steps = []
    for step in range(1, count):
        slept = [each for rank in ranks for each in rank[step * len(rank) // count : (step + 1) * len(rank) // count]]
        span = max(end for _, end in slept) - min(begin for begin, _ in slept)
        steps.append((span, sum(end - begin for begin, end in slept)))
    seconds, busy = min(steps)  # other work on the machine only adds to it
    return {
        "simulated": expected.bubble,
        "measured": 1 - busy / (shape.pp * seconds),
        "simulated_s": expected.seconds,
        "measured_s": seconds,
        "longer": busy / sum(expected.busy) - 1,  # passes whose small model took more than their time
    }


def durations_of(shape: PipelineShape, *, frozen: bool) -> Durations:
    """Return how long each pass sleeps: as the planner predicts them at the fastest cuts, and `MEAN` in the mean."""
    config = Config(
        model=replace(published_model(MODEL), freeze=("vision",) if frozen else ()),
        precision=PrecisionConfig(dtype="bf16"),
        parallel=ParallelConfig(),
        execution=ExecutionConfig(transformer_impl="torch"),
        train=TrainConfig(seq_length=8192, global_batch_size=shape.micro_batches),
        data=DataConfig(kind="synthetic", images_per_sample=(4,), image_sizes=(1008,)),
    )
    hardware = for_precision(PROFILES["h100"], "bf16")
    scenario = scenario_of(config, Dims(pp=shape.pp), on_gpu=True)
    profiles = layer_profiles(scenario, hardware)
    best = best_partition(profiles, shape)
    assert isinstance(best, Partition)
    found = profiles.durations(list(pairwise((0, *best.cuts, profiles.count))), [], shape=shape)
    slower = MEAN / found.forward[:, 0].mean() / shape.vpp
    assert found.weight is not None
    return Durations(slower * found.forward, slower * found.backward, slower * found.weight)


def train_asleep(argv: Sequence[str], run_dir: str, durations: Durations) -> list[Slept]:
    """Train, and let each pass take as long as it should; return when this rank's passes began and ended."""
    slept: list[Slept] = []
    with asleep(durations, slept):
        train(argv, run_dir)
    return slept


@contextlib.contextmanager
def asleep(durations: Durations, slept: list[Slept]) -> Iterator[None]:
    """Within this context passes last as long as planned, whichever runtime runs them, and are written down. Of several
    planned steps each has its turn.
    """
    from megatron.core.pipeline_parallel import schedules

    from megavlm.model.vlm import bare_chunk
    from megavlm.model.weight_gradients import WeightGradients
    from megavlm.pipeline import walker

    micros = durations.forward.shape[1]
    count: Counter[int] = Counter()  # forward passes that each chunk has begun
    passes: dict[int, tuple[int, int]] = {}  # chunk and number of the forward pass, by their outputs
    forward, backward, compute = schedules.forward_step, schedules.backward_step, WeightGradients.compute

    def time_of(times: Times, chunk: int, number: int) -> float:
        """Return the seconds of a pass, given how many of its kind its chunk has begun before it."""
        step, micro = divmod(number, micros)
        return float(times[chunk, micro] if times.ndim == 2 else times[chunk, micro, step % times.shape[2], 0])

    def lasting(seconds: float, run: Callable[[], Any]) -> Any:
        begin = time.monotonic()
        result = run()
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        slept.append((begin, time.monotonic()))
        return result

    def slow_forward(function: Any, iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = bare_chunk(model)
        number = chunk.groups.coords.pp + chunk.groups.dims.pp * (chunk.vp_stage or 0)
        seconds = time_of(durations.forward, number, count[number])
        result = lasting(seconds, lambda: forward(function, iterator, model, *args, **kwargs))
        passes[id(_tensor(result[0]))] = number, count[number]
        count[number] += 1
        return result

    def slow_backward(inputs: Any, outputs: Any, *args: Any) -> Any:
        seconds = time_of(durations.backward, *passes.pop(id(_tensor(outputs))))
        return lasting(seconds, lambda: backward(inputs, outputs, *args))

    def slow_compute(self: WeightGradients, chunk: int, micro_batch: int) -> None:
        assert durations.weight is not None
        step = (count[chunk] - 1) // micros  # no step begins before the last one's weight gradients are done
        seconds = time_of(durations.weight, chunk, step * micros + micro_batch)
        lasting(seconds, lambda: compute(self, chunk, micro_batch))

    with pytest.MonkeyPatch.context() as patch:
        for module in (schedules, walker):
            patch.setattr(module, "forward_step", slow_forward)
            patch.setattr(module, "backward_step", slow_backward)
        patch.setattr(WeightGradients, "compute", slow_compute)
        yield


def _tensor(made: Any) -> Any:
    return made[0] if isinstance(made, list) else made


if __name__ == "__main__":
    main()
