"""Train step after step, with hooks around each (`hooks_of` lists them), to the last iteration or a request to stop.

The record of a step in metrics.jsonl follows from the sums of all ranks' counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial

import torch
import torch.distributed as dist

from megavlm.arch.kinds import step_flops
from megavlm.arch.workload import Workload
from megavlm.backend.accelerator import peak_memory, profiler_range
from megavlm.data.types import StepData
from megavlm.errors import Stopped, UserError
from megavlm.metrics.callback import Value
from megavlm.planner.hardware import peak_tflops
from megavlm.resilience import events
from megavlm.resilience.events import State, note_failure, write_status
from megavlm.resilience.signals import StopRequest
from megavlm.train.hooks.device_checks import DeviceChecks
from megavlm.train.hooks.held_out import SamplesHook, ValidationHook, final_evaluation
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.hooks.saves import Saves
from megavlm.train.hooks.step_guard import StepGuard
from megavlm.train.hooks.stops import DataAhead, SkippedSamples, Stops, Tally
from megavlm.train.hooks.trace import Trace
from megavlm.train.run import Run
from megavlm.train.step_result import Counts, StepResult, counts_of, load_record


def fit(run: Run, stop: StopRequest | None = None, *, explain: Callable[..., str] | None = None) -> None:
    """Train to the last iteration or a request to stop, save a checkpoint, and evaluate a run that finished.

    `explain` (of `planner.auto`) returns one line on a lack of memory, which then ends the run as a UserError.

    Raises Stopped after a request, UserError if too many samples were skipped, data cannot be read or a user's callback
    raised, each after a save; BadNumbers, without a save, if too many steps in a row were bad or the state to be saved
    is not finite.
    """
    stop = stop or StopRequest()
    with ExitStack() as ending:
        ending.push(lambda kind, error, trace: close(run, error))
        try:
            stop.training()
            run.lock.when_lost(partial(stop.ask, warning=True))
            hooks = hooks_of(run, stop)
            ending.callback(hooks.leave)
            iteration, end = _train(run, hooks)
            if isinstance(end, Stopped):
                stop.closing()
                _note(run, "stop", "stopped", iteration=iteration, reason=str(end))
                run.say(f"stopped at iteration {iteration}; the same command continues from here")
            if end is not None:
                _finish_uploads(run)
                raise end
            _note(run, "finish", "finished", iteration=iteration)
            run.say(_ended(run, iteration))
            if not _finish_uploads(run):  # before `saved`: after a request in the last step nothing would be waited for
                raise UserError(
                    f"not all checkpoints are copied to --checkpoint-dir {run.config.checkpoint.checkpoint_dir} "
                    "(RUN_DIR/events.jsonl says why): the same command copies the rest"
                )
            stop.saved()
            final_evaluation(run)
        except torch.OutOfMemoryError as error:
            shown = error if explain is None else _out_of_memory(run, explain)
            note_failure(run.run_dir, shown)
            if shown is error:
                raise
            raise shown from error
        except Exception as error:
            if not isinstance(error, Stopped):
                note_failure(run.run_dir, error)
            raise


def _ended(run: Run, iteration: int) -> str:
    """Return the last line of a finished run; if nothing was trained, it says why."""
    if run.position.iteration < run.config.train.train_iters:
        return "finished"
    length = "--epochs" if run.config.train.epochs is not None else "--train-iters"
    return (
        f"finished: nothing was trained, because the checkpoint is of iteration {iteration} and {length} ends at "
        f"{run.config.train.train_iters}; raise {length} to train on"
    )


def _finish_uploads(run: Run) -> bool:
    """Wait until all checkpoints are copied to --checkpoint-dir; return whether they are. Every rank calls it."""
    if run.uploads is None or run.uploads.finish(run.engine.schedule.phases):
        return True
    run.say(f"NOT ALL CHECKPOINTS ARE COPIED to {run.config.checkpoint.checkpoint_dir}: they are in {run.run_dir}")
    return False


def _out_of_memory(run: Run, explain: Callable[..., str]) -> UserError:
    """Return an error that names the largest uses of this rank's memory, and a setting that needs less."""
    on_gpu = not run.backend.is_cpu
    capacity = torch.cuda.get_device_properties(run.backend.device).total_memory if on_gpu else None
    return UserError(explain(run.config, run.plan.dims, rank=dist.get_rank(), on_gpu=on_gpu, capacity=capacity))


def _train(run: Run, hooks: Hooks) -> tuple[int, BaseException | None]:
    """Train and save; return the last iteration, and the reason for an early end or None, equal on all ranks."""
    iteration, end = run.position.iteration, None
    for hook in hooks:
        hook.begin()
    while iteration < run.config.train.train_iters and end is None:
        iteration += 1
        for hook in hooks:
            hook.on_step_begin(iteration)
        step = take_step(run, iteration, hooks)
        for hook in hooks:
            step.record.update(hook.measure(step))
        for hook in hooks:
            hook.on_step_end(step)
        end = next(filter(None, (hook.ends(step) for hook in hooks)), None)
        del step  # and its data, while the next step's and those after it are in memory
    for hook in reversed(hooks.ordered):
        end = hook.finish(iteration, end)
    return iteration, end


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
    colocated = run.engine.schedule.colocated
    encoded = colocated.encoder.encoded if colocated is not None and run.config.placement.vision_cache else None
    if encoded:
        encoded.clear()  # those of the step before, and of a validation

    def counters() -> Sequence[float]:
        return ahead.counters(counts_of(data, run.engine.groups, run.config.model, encoded))

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
    left_out = math.isnan(result.loss) and not result.trained_tokens
    taken = math.inf if left_out else seconds  # a batch that is left out takes no time: its rates would be any number
    tflops = step_flops(run.config, work) / taken / run.plan.dims.world / 1e12
    fp8 = run.config.precision.fp8 != "none"
    peak = peak_tflops(run.backend.name, "fp8" if fp8 else run.config.precision.dtype)
    memory = max(peak_memory(run.backend.device), run.watch.peak_memory)
    record: dict[str, Value] = {
        "iteration": iteration,
        "time": datetime.now(UTC).isoformat(timespec="microseconds"),  # at which the step ended
        "loss": None if left_out else result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "tokens": int(counts.tokens),
        "trained_tokens": result.trained_tokens,
        "image_tokens": int(counts.image_tokens),
        "images": int(counts.images),
        "samples": int(counts.samples),
        "skipped_samples": int(counts.skipped),
        "split_samples": int(counts.split),
        "packing_efficiency": counts.tokens / max(counts.positions, 1),
        "updated": result.updated,
        "step_time_s": seconds,
        "data_time_s": data_time,
        "tokens_per_second": int(counts.tokens) / taken,
        "images_per_second": counts.images / taken,
        "samples_per_second": counts.samples / taken,
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


def _note(run: Run, kind: str, state: State, *, iteration: int, reason: str | None = None) -> None:
    """Write the end of the run to events.jsonl and status.json, on rank 0."""
    if run.progress is not None:
        events.record(run.run_dir, kind, iteration=iteration, reason=reason)
        write_status(run.run_dir, state, iteration=iteration, reason=reason)


def close(run: Run, error: BaseException | None = None) -> None:
    """Stop the data loader's workers, free the engine, call the callbacks' `on_stop` (with the error, if any),
    release the lock on the run folder, and stop watching.
    """
    run.watch.ending()
    run.data_loader.close()
    if run.validation_loader is not None:
        run.validation_loader.close()
    run.skipped.close()
    if run.saver is not None:
        run.saver.close()
    if run.uploads is not None:
        run.uploads.close()
    run.engine.close()
    run.callbacks.on_stop(error)
    run.lock.release()
    run.watch.close()


@dataclass(frozen=True)
class Hooks:
    """All hooks of a run in order, with the two that the training loop uses by name."""

    ordered: tuple[RankHook, ...]
    guard: StepGuard
    ahead: DataAhead

    def __iter__(self) -> Iterator[RankHook]:
        return iter(self.ordered)

    def judge(self, loss: float, norm: float | None) -> str | None:
        """Return the first hook's reason why a step must not change the weights; None if it may."""
        return next(filter(None, (hook.judge(loss, norm) for hook in self)), None)

    def leave(self) -> None:
        """Release the resources of all hooks."""
        for hook in self:
            hook.leave()


def hooks_of(run: Run, stop: StopRequest) -> Hooks:
    """Return the hooks of a run. Each method is called in this order, `finish` in the reverse."""
    stops, guard = Stops(run, stop), StepGuard(run)
    tally = Tally(run.position.samples_read, run.position.samples_skipped)
    saves = Saves(run, tally, guard, stops)
    ahead = DataAhead(run, stop, bad_save=saves.bad)
    ordered = (
        Trace(run),  # first: neither checks nor validation are in it
        run.watch,
        DeviceChecks(run, guard.report),  # its fault comes before the guard's reason to skip a step
        ahead,
        SkippedSamples(run, tally, keeps=saves.keeps),  # tallied before a save notes the position
        ValidationHook(run, stops),
        SamplesHook(run, stops),
        run.callbacks,  # the record is complete; a bad step is shown before what follows from it
        guard,
        saves,
        stops,  # last: an error says more than a request to stop
    )
    return Hooks(ordered, guard, ahead)
