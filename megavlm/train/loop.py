"""The loop: batches → step → record → evaluation → checkpoint, until the last iteration or a stop signal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from megavlm.checkpoint import state
from megavlm.config.lora import adapted_parts
from megavlm.data.batch import PackedBatch
from megavlm.data.loader import stats
from megavlm.metrics import throughput
from megavlm.metrics.sinks import Value
from megavlm.model.flops import Workload, step_flops, window_patches, window_squares
from megavlm.resilience.signals import StopRequest
from megavlm.train import evaluate
from megavlm.train.build import Run
from megavlm.train.engine import StepResult


def fit(run: Run) -> None:
    """Train to the end (or to a clean stop with a checkpoint), then evaluate where the source has questions."""
    stop = StopRequest()
    config = run.config
    iteration, saved = run.first_iteration, run.first_iteration
    try:
        while iteration < config.train.train_iters:
            iteration += 1
            before = time.perf_counter()
            batches = run.loader.next_batches()
            fetched = time.perf_counter()
            result = run.engine.train_step(batches, _counters(run, batches, stop=stop.requested))
            counts = _Counts(*result.counters)
            record = _record(run, iteration, result, counts, data_time=fetched - before, began=before)
            if _due(iteration, config.evaluation.eval_interval) and iteration < config.train.train_iters:
                record |= _interval_evaluation(run)
            for sink in run.sinks:
                sink.log(record)
            if _due(iteration, config.checkpoint.save_interval):
                saved = _save(run, iteration)
            if counts.stop:
                break
        if saved != iteration:
            _save(run, iteration)
        finished = iteration >= config.train.train_iters
        _say(run, "finished" if finished else f"stopped at iteration {iteration}; the same command goes on from here")
        if finished:
            _final_evaluation(run)
    finally:
        stop.restore()
        close(run)


def close(run: Run) -> None:
    """End the loader's thread, the engine and the sinks' files."""
    run.loader.close()
    run.engine.close()
    for sink in run.sinks:
        sink.close()


@dataclass(frozen=True)
class _Counts:
    """Sums over the global batch that travel with the step's all-reduce."""

    tokens: float
    image_tokens: float
    images: float
    patches: float
    patch_squares: float
    window_squares: float
    token_squares: float
    stop: float  # ranks that were asked to stop


def _counters(run: Run, batches: Sequence[PackedBatch], *, stop: bool) -> Sequence[float]:
    """This rank's share of `_Counts`: only one rank of each replica counts the batch, every rank may ask to stop."""
    at = run.engine.groups.at
    if at.tp or at.pp:
        return (0.0,) * 7 + (float(stop),)
    counted = stats(batches)
    class_token, window = run.config.model.vision.class_token, window_patches(run.config.model)
    grids = [grid for batch in batches for grid in batch.grids]
    lengths = [rows * columns + class_token for rows, columns in grids]
    return (
        counted.tokens,
        counted.image_tokens,
        counted.images,
        sum(lengths),
        sum(length * length for length in lengths),
        sum(window_squares(grid, window) for grid in grids) if window else 0,
        sum(length * length for batch in batches for length in batch.lengths),
        float(stop),
    )


def _record(
    run: Run, iteration: int, result: StepResult, counts: _Counts, *, data_time: float, began: float
) -> dict[str, Value]:
    """The line of metrics.jsonl."""
    seconds = time.perf_counter() - began
    work = Workload(
        patches=int(counts.patches),
        patch_squares=int(counts.patch_squares),
        window_squares=int(counts.window_squares),
        tokens=int(counts.tokens),
        token_squares=int(counts.token_squares),
    )
    flops = step_flops(run.config.model, work, adapted=adapted_parts(run.config))
    tflops = throughput.model_tflops_per_device(flops=flops, seconds=seconds, devices=run.plan.dims.world)
    peak = throughput.peak_tflops(run.backend.name, run.config.train.precision)
    return {
        "iteration": iteration,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "tokens": int(counts.tokens),
        "trained_tokens": result.trained_tokens,
        "image_tokens": int(counts.image_tokens),
        "images": int(counts.images),
        "updated": result.updated,
        "step_time_s": seconds,
        "data_time_s": data_time,
        "tokens_per_second": throughput.tokens_per_second(int(counts.tokens), seconds),
        "model_tflops_per_device": tflops,
        "mfu": throughput.mfu(tflops, peak),
    }


def _due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0


def _save(run: Run, iteration: int) -> int:
    if not run.config.checkpoint.save:
        return iteration
    began = time.perf_counter()
    position = state.Position(iteration=iteration, loader=run.loader.state_dict())
    folder = state.save(
        run.engine.trained(),
        position,
        config=run.config,
        plan=run.plan,
        root=run.run_dir / "checkpoints",
        keep=run.config.checkpoint.keep_checkpoints,
    )
    _say(run, f"saved {folder} in {time.perf_counter() - began:.1f} s")
    return iteration


def _interval_evaluation(run: Run) -> dict[str, Value]:
    """A quick look at held-out questions: a third of the final evaluation's."""
    if not isinstance(run.source, evaluate.Examiner):
        return {}
    questions = run.source.questions(max(1, run.config.evaluation.eval_samples // 3))
    predictions = evaluate.answer_all(
        run.engine, run.source, questions, micro_batch_size=run.config.train.micro_batch_size
    )
    scores = evaluate.exact_match(questions, predictions)
    _say(run, "held-out exact match: " + ", ".join(f"{kind} {score:.0%}" for kind, score in scores.items()))
    return {f"eval_{kind.replace(' ', '_')}": score for kind, score in scores.items()}


def _final_evaluation(run: Run) -> None:
    if not isinstance(run.source, evaluate.Examiner):
        return
    _say(run, "answering held-out questions …")
    examination = evaluate.examine(
        run.engine,
        run.source,
        per_kind=run.config.evaluation.eval_samples,
        micro_batch_size=run.config.train.micro_batch_size,
    )
    if run.progress is not None:
        _say(run, evaluate.report(examination, run.run_dir))
        _say(run, f"examples: {run.run_dir / 'examples.png'}")


def _say(run: Run, text: str) -> None:
    if run.progress is not None:
        run.progress.message(text)
