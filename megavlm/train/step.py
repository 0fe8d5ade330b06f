"""Take a step, and compute its record in metrics.jsonl from the sums of all ranks' counts."""

from __future__ import annotations

import math
import time
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial

from megavlm.arch.kinds import step_flops
from megavlm.arch.workload import Workload
from megavlm.backend.accelerator import peak_memory, profiler_range
from megavlm.data.types import StepData
from megavlm.metrics.callback import Value
from megavlm.planner.devices import peak_tflops
from megavlm.train.hooks.hook import Step
from megavlm.train.hooks.order import Hooks
from megavlm.train.run import Run
from megavlm.train.step_result import Counts, StepResult, counts_of, load_record


def take_step(run: Run, iteration: int, hooks: Hooks) -> Step:
    """Train on the next batch, or leave it out."""
    began = time.perf_counter()
    guard, ahead = hooks.guard, hooks.ahead
    with profiler_range("data"):
        data = run.data_loader.next_step()
        has_next = iteration < run.config.train.train_iters
        encodes_ahead = run.config.placement.encode_ahead and has_next and not guard.leaves_out(iteration + 1)
        upcoming = run.data_loader.peek().batches if encodes_ahead else None
    fetched = time.perf_counter() - began
    counters = partial(ahead.counters, counts_of(data, run.engine.groups, run.config.model))
    if guard.leaves_out(iteration):
        result = run.engine.leave_out(counters)
    else:
        result = run.engine.train_step(data.batches, counters, upcoming=upcoming, judge=hooks.judge)
    counts = ahead.settled(Counts(*result.counters))
    seconds = time.perf_counter() - began
    return Step(
        record=_record(run, iteration, data, result, counts, data_time=fetched + ahead.waited, seconds=seconds),
        expert_loads={layer: load.tokens for layer, load in result.expert_loads.items()},
        data=data,
        result=result,
        counts=counts,
        seconds=seconds,
        error=ahead.error(counts),
    )


def _record(
    run: Run, iteration: int, step: StepData, result: StepResult, counts: Counts, *, data_time: float, seconds: float
) -> dict[str, Value]:
    counted = {each.name: int(getattr(counts, each.name)) for each in fields(Workload) if hasattr(counts, each.name)}
    trained = round(result.measures.get("answer_tokens", 1) * result.trained_tokens)
    work = Workload(**counted, trained_tokens=trained)
    flops = step_flops(run.config, work)
    tflops = flops / seconds / run.plan.dims.world / 1e12
    fp8 = run.config.precision.fp8 != "none"
    peak = peak_tflops(run.backend.name, "fp8" if fp8 else run.config.precision.dtype)
    memory = max(peak_memory(run.backend.device), run.watch.peak_memory)
    record: dict[str, Value] = {
        "iteration": iteration,
        "time": datetime.now(UTC).isoformat(timespec="microseconds"),  # at which the step ended
        "loss": None if math.isnan(result.loss) and not result.trained_tokens else result.loss,  # left out
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "tokens": int(counts.tokens),
        "trained_tokens": result.trained_tokens,
        "image_tokens": int(counts.image_tokens),
        "images": int(counts.images),
        "skipped_samples": int(counts.skipped),
        "split_samples": int(counts.split),
        "packing_efficiency": counts.tokens / max(counts.positions, 1),
        "updated": result.updated,
        "step_time_s": seconds,
        "data_time_s": data_time,
        "tokens_per_second": int(counts.tokens) / seconds,
        "images_per_second": counts.images / seconds,
        "model_tflops_per_device": tflops,
        "mfu": None if peak is None else tflops / peak,  # as PaLM: recomputation is not counted
        "peak_memory_gib": memory / 2**30,  # of the fullest rank; the others' reports are seconds old
    }
    if step.epochs is not None:
        record["epoch"] = step.epochs
    if result.refused is not None:
        record["refused"] = result.refused
    if result.loss_scale is not None:
        record["loss_scale"] = result.loss_scale
    if result.trained_tokens:
        record |= result.measures
    if result.mtp_loss is not None:
        record["mtp_loss"] = None if record["loss"] is None else result.mtp_loss
    record |= load_record(result.expert_loads, run.config.model, trained_tokens=result.trained_tokens)
    if result.head_logits:
        threshold = run.config.optimizer.qk_clip_threshold
        record["max_attention_logit"] = max(result.head_logits)
        record["qk_clipped_heads"] = sum(logit > threshold for logit in result.head_logits) if result.updated else 0
    if step.imbalance is not None:
        record |= {f"imbalance_{name}": value for name, value in vars(step.imbalance).items()}
    if result.source_losses:
        losses = zip(run.source.names, result.source_losses, strict=True)
        record["loss_by_source"] = {name: None if math.isnan(loss) else loss for name, loss in losses}
    return record
