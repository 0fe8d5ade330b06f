"""Train: batches → step → record → validation → checkpoint, to the last iteration or a stop signal."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megavlm.backend.profiler_range import profiler_range
from megavlm.checkpoint import state
from megavlm.data.types import StepData
from megavlm.errors import BadNumbers, Stopped, UserError
from megavlm.metrics.callback import StepEnd, Value
from megavlm.planner.out_of_memory import explain
from megavlm.program import program
from megavlm.resilience import events
from megavlm.resilience.signals import StopRequest
from megavlm.resilience.status import State, note_failure, write_status
from megavlm.train.build import Run
from megavlm.train.counts import Counts, Tally, TooManySkipped, counts_of
from megavlm.train.data_ahead import DataAhead
from megavlm.train.evaluate import final_evaluation
from megavlm.train.patience import Patience
from megavlm.train.record import record_of
from megavlm.train.samples import Samples
from megavlm.train.saves import Saves
from megavlm.train.step_guard import StepGuard
from megavlm.train.step_result import StepResult
from megavlm.train.trace import Tracer
from megavlm.train.validate import Validation
from megavlm.train.watch import Watch

_WORTH_KEEPING = 100  # steps


def fit(run: Run, stop: StopRequest | None = None) -> None:
    """Train to the last iteration or a request to stop, save a checkpoint, and evaluate a run that finished.

    Raises Stopped after a request, UserError if too many samples were skipped, data cannot be read or a user's callback
    raised, each after a save; BadNumbers, without one, if too many steps in a row were bad or state that is to be saved
    is not finite.
    """
    stop = stop or StopRequest()
    tracer = Tracer(run.engine, run.config.logging, rank=dist.get_rank(), run_dir=run.run_dir, say=partial(_say, run))
    watch = run.watch
    try:
        stop.training()
        run.lock.when_lost(partial(stop.ask, warning=True))
        iteration, end = _train(run, stop, tracer, watch)
        if isinstance(end, Stopped):
            stop.closing()
            _note(run, "stop", "stopped", iteration=iteration, reason=str(end))
            _say(run, f"stopped at iteration {iteration}; the same command continues from here")
        if end is not None:
            _finish_uploads(run)
            raise end
        _note(run, "finish", "finished", iteration=iteration)
        _say(run, _ended(run, iteration))
        stop.saved()
        final_evaluation(run, partial(_say, run))
        if not _finish_uploads(run):
            raise UserError(
                f"not all checkpoints are copied to --checkpoint-dir {run.config.checkpoint.checkpoint_dir} "
                f"(RUN_DIR/events.jsonl says why): {program('checkpoint')} copy {run.run_dir} copies the last one"
            )
    except torch.OutOfMemoryError as error:
        told = _out_of_memory(run)
        note_failure(run.run_dir, told)
        raise told from error
    except Exception as error:
        if not isinstance(error, Stopped):
            note_failure(run.run_dir, error)
        raise
    finally:
        tracer.close()
        close(run, sys.exception())


def _ended(run: Run, iteration: int) -> str:
    """Return what a run that finished says; one that had nothing to do says why."""
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
    _say(run, f"NOT ALL CHECKPOINTS ARE COPIED to {run.config.checkpoint.checkpoint_dir}: they are in {run.run_dir}")
    return False


def _out_of_memory(run: Run) -> UserError:
    """Return an error that says what takes this rank's memory, and which setting takes less."""
    on_gpu = not run.backend.is_cpu
    capacity = torch.cuda.get_device_properties(run.backend.device).total_memory if on_gpu else None
    return UserError(explain(run.config, run.plan.dims, rank=dist.get_rank(), on_gpu=on_gpu, capacity=capacity))


def _train(run: Run, stop: StopRequest, tracer: Tracer, watch: Watch) -> tuple[int, BaseException | None]:
    """Train and save; return the last iteration, and why it is not the run's last, equal on all ranks."""
    config, last, say = run.config, run.config.train.train_iters, partial(_say, run)
    iteration = saved = run.position.iteration
    tally = Tally(run.position.samples_read, run.position.samples_skipped)
    patience, guard = Patience(say), StepGuard(run, say)
    saves, validation = Saves(run, say=say, took=patience.save), Validation(run, stop, say)
    samples = Samples(run, stop, say)
    overdue = False  # a checkpoint is due, but the last step was bad
    end: BaseException | None = None
    record: dict[str, Value] = {}
    if iteration == 0 and samples.is_due(0):
        samples.answer(0)
    while iteration < last and end is None:
        iteration += 1
        tracer.before(iteration)
        watch.begin_step(iteration)
        step = _step(run, iteration, guard, stop, saves)
        tracer.after(iteration)
        guard.note(step.result)
        tally.add(step.counts, step.data.skipped if run.engine.groups.is_reader else ())
        run.skipped.write(iteration, step.data.skipped)
        record = step.record | watch.end_step(iteration, step.seconds) | {"skipped_steps": guard.skipped}
        asked = step.counts.stop > 0
        if validation.is_due(iteration) and not asked:
            record |= validation.measure(iteration)
            asked = validation.stopped
        if samples.is_due(iteration) and not asked:
            record |= samples.answer(iteration)
            asked = samples.stopped
        record |= saves.news()
        loads = {layer: load.tokens for layer, load in step.result.expert_loads.items()}
        run.callbacks.on_step_end(StepEnd(record, loads))
        saves.tell()
        guard.act(iteration, step.data, step.result)
        patience.step(step.seconds)
        if isinstance(step.error, BadNumbers):
            raise step.error
        overdue |= _due(iteration, config.checkpoint.save_interval)
        if overdue and guard.trusts_weights:
            saves.save(_position(run, iteration, tally, guard), record)
            saved, overdue = iteration, False
            asked = asked or _anywhere(stop.requested, run)  # during the save
        end = step.error if iteration < last else None
        end = end or tally.too_many_skipped(config, keeps=_keeps(run, saved, iteration))
        if iteration < last:
            end = end or (_stopped(run, stop) if asked else None)
    if saved != iteration and (not isinstance(end, TooManySkipped) or _keeps(run, saved, iteration)):
        saves.save(_position(run, iteration, tally, guard), record)
    saves.finish()
    saves.tell()
    if config.logging.callback:
        end = end or run.callbacks.agreed_failure()
    return iteration, end


def _keeps(run: Run, saved: int, iteration: int) -> bool:
    """Return whether a run that ends for bad data keeps a checkpoint. One that has hardly begun does not: its place in
    the data would refuse the mended command, and nothing is lost.
    """
    return run.saver is not None and (saved > 0 or iteration >= _WORTH_KEEPING)


@dataclass(frozen=True)
class _Step:
    """A step that is done, or that was left out."""

    data: StepData
    result: StepResult
    counts: Counts  # sums over all ranks
    record: dict[str, Value]
    seconds: float
    error: BaseException | None  # the next step's data cannot be read, or a save must end the run; equal on all ranks


def _step(run: Run, iteration: int, guard: StepGuard, stop: StopRequest, saves: Saves) -> _Step:
    """Train on the next batch, or leave it out."""
    began = time.perf_counter()
    last = iteration == run.config.train.train_iters
    with profiler_range("data"):
        data = run.data_loader.next_step()
        encodes_ahead = run.config.placement.encode_ahead and not last and not guard.leaves_out(iteration + 1)
        upcoming = run.data_loader.peek().batches if encodes_ahead else None
    fetched = time.perf_counter() - began
    ahead = DataAhead(run, counts_of(run, data), stop, saves, needed=not last)
    if guard.leaves_out(iteration):
        result = run.engine.leave_out(ahead.counters)
    else:
        with guard.checks(iteration) as judge:
            result = run.engine.train_step(data.batches, ahead.counters, upcoming=upcoming, judge=judge)
    counts = ahead.settled(Counts(*result.counters))
    seconds = time.perf_counter() - began
    record = record_of(run, iteration, data, result, counts, data_time=fetched + ahead.waited, seconds=seconds)
    return _Step(data, result, counts, record, seconds, ahead.error(counts))


def _stopped(run: Run, stop: StopRequest) -> Stopped:
    return Stopped(stop.reason or run.callbacks.stop or "another rank was asked to stop")


def _anywhere(value: bool, run: Run) -> bool:
    """Return whether a value is true on any rank; every rank calls it."""
    found = torch.tensor(int(value), device=run.backend.device)
    dist.all_reduce(found)
    return bool(found.item())


def _note(run: Run, kind: str, state: State, *, iteration: int, reason: str | None = None) -> None:
    """Write an end of the run to its record of events and to status.json."""
    if run.progress is not None:
        events.record(run.run_dir, kind, iteration=iteration, reason=reason)
        write_status(run.run_dir, state, iteration=iteration, reason=reason)


def close(run: Run, error: BaseException | None = None) -> None:
    """Stop the data loader's workers, free the engine, tell the callbacks of the end (by an error, if there is one),
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


def _due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0


def _position(run: Run, iteration: int, tally: Tally, guard: StepGuard) -> state.Position:
    return state.Position(
        iteration=iteration,
        loader=run.data_loader.state_dict(),
        samples_read=tally.read,
        samples_skipped=tally.skipped,
        bad_steps=guard.state_dict(),
    )


def _say(run: Run, text: str) -> None:
    if run.progress is not None:
        run.progress.message(text)
