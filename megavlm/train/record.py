"""Compute the record of a step in metrics.jsonl from the sums of all ranks' counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from megavlm.arch.flops import step_flops
from megavlm.arch.workload import Workload, image_workload, sliding_squares
from megavlm.data.rank_loader import stats
from megavlm.data.types import StepData
from megavlm.metrics import throughput
from megavlm.metrics.sinks import Value
from megavlm.train.build import Run
from megavlm.train.engine import StepResult


@dataclass(frozen=True)
class Counts:
    """Counts of a global batch, which the all-reduce of the training step sums over ranks."""

    tokens: float = 0
    places: float = 0
    image_tokens: float = 0
    images: float = 0
    patches: float = 0
    patch_squares: float = 0
    window_squares: float = 0
    features: float = 0
    token_squares: float = 0
    sliding_squares: float = 0
    read: float = 0  # samples read, including skipped ones
    skipped: float = 0  # samples skipped
    split: float = 0  # samples of which a part was skipped
    stop: float = 0  # ranks that were asked to stop
    failed: float = 0  # replicas whose next data cannot be read

    def values(self) -> Sequence[float]:
        return [float(getattr(self, field.name)) for field in fields(self)]


def counts_of(run: Run, step: StepData) -> Counts:
    """Return this rank's counts of a batch: one rank of each replica counts it."""
    if not run.engine.groups.is_reader:
        return Counts()
    counted = stats(step.batches)
    grids = [grid for batch in step.batches for grid in batch.image_sizes.grids]
    images = image_workload(grids, run.config.model)
    lengths = [length for batch in step.batches for length in batch.text.lengths]
    return Counts(
        tokens=counted.tokens,
        places=counted.places,
        image_tokens=counted.image_tokens,
        images=counted.images,
        patches=images.patches,
        patch_squares=images.patch_squares,
        window_squares=images.window_squares,
        features=images.features,
        token_squares=sum(length * length for length in lengths),
        sliding_squares=sum(sliding_squares(length, run.config.model.language.window_size) for length in lengths),
        read=step.read,
        skipped=sum(not skip.partly for skip in step.skipped),
        split=sum(skip.partly for skip in step.skipped),
    )


def record_of(
    run: Run, iteration: int, step: StepData, result: StepResult, counts: Counts, *, data_time: float, seconds: float
) -> dict[str, Value]:
    work = Workload(
        patches=int(counts.patches),
        patch_squares=int(counts.patch_squares),
        window_squares=int(counts.window_squares),
        features=int(counts.features),
        tokens=int(counts.tokens),
        token_squares=int(counts.token_squares),
        sliding_squares=int(counts.sliding_squares),
    )
    flops = step_flops(run.config, work)
    tflops = throughput.model_tflops_per_device(flops=flops, seconds=seconds, devices=run.plan.dims.world)
    peak = throughput.peak_of_run(run.backend.name, run.config)
    record: dict[str, Value] = {
        "iteration": iteration,
        "loss": None if math.isnan(result.loss) and not result.trained_tokens else result.loss,  # left out
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "tokens": int(counts.tokens),
        "trained_tokens": result.trained_tokens,
        "image_tokens": int(counts.image_tokens),
        "images": int(counts.images),
        "skipped_samples": int(counts.skipped),
        "split_samples": int(counts.split),
        "packing_efficiency": counts.tokens / max(counts.places, 1),
        "updated": result.updated,
        "step_time_s": seconds,
        "data_time_s": data_time,
        "tokens_per_second": throughput.tokens_per_second(int(counts.tokens), seconds),
        "images_per_second": counts.images / seconds,
        "model_tflops_per_device": tflops,
        "mfu": throughput.mfu(tflops, peak),
    }
    if result.refused is not None:
        record["refused"] = result.refused
    if result.loss_scale is not None:
        record["loss_scale"] = result.loss_scale
    if step.imbalance is not None:
        record |= {f"imbalance_{name}": value for name, value in vars(step.imbalance).items()}
    if result.source_losses:
        losses = zip(run.source.names, result.source_losses, strict=True)
        record["loss_by_source"] = {name: None if math.isnan(loss) else loss for name, loss in losses}
    return record
