"""Train: batches → step → record → evaluation → checkpoint, to the last iteration or a stop signal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from megavlm.backend.profiler_range import profiler_range
from megavlm.checkpoint import state
from megavlm.data.collate import CollateSpec
from megavlm.errors import Stopped, UserError
from megavlm.metrics.sinks import Value
from megavlm.planner.out_of_memory import explain
from megavlm.resilience import events
from megavlm.resilience.phases import EVALUATION, OTHER
from megavlm.resilience.signals import StopRequest, patience_complaint, torchrun_patience, under_torchrun
from megavlm.resilience.status import State, note_failure, write_status
from megavlm.train import evaluate
from megavlm.train.build import Run
from megavlm.train.record import Counts, counts_of, record_of
from megavlm.train.saves import Saves
from megavlm.train.step_guard import StepGuard
from megavlm.train.trace import Tracer
from megavlm.train.watch import Watch

# A run with at most this many skipped samples goes on, whatever their share.
_LEAST_SKIPPED = 20


def fit(run: Run, stop: StopRequest | None = None) -> None:
    """Train to the last iteration or a request to stop, save a checkpoint, and evaluate a run that finished.

    Raises Stopped after a request, UserError if too many samples were skipped or if data cannot be read, each after a
    save; BadNumbers, without one, if too many steps in a row were bad.
    """
    stop = stop or StopRequest()
    tracer = Tracer(run.engine, run.config.logging, rank=dist.get_rank(), run_dir=run.run_dir, say=partial(_say, run))
    watch = Watch(run)
    try:
        stop.training()
        iteration, end = _train(run, stop, tracer, watch)
        if isinstance(end, Stopped):
            stop.closing()
            _note(run, "stop", "stopped", iteration=iteration, reason=str(end))
            _say(run, f"stopped at iteration {iteration}; the same command continues from here")
        if end is not None:
            raise end
        _note(run, "finish", "finished", iteration=iteration)
        _say(run, "finished")
        stop.saved()
        _final_evaluation(run)
    except torch.OutOfMemoryError as error:
        told = _out_of_memory(run)
        note_failure(run.run_dir, told)
        raise told from error
    except Exception as error:
        if not isinstance(error, Stopped):
            note_failure(run.run_dir, error)
        raise
    finally:
        watch.close()
        tracer.close()
        close(run)


def _out_of_memory(run: Run) -> UserError:
    """Return an error that says what takes this rank's memory, and which setting takes less."""
    on_gpu = not run.backend.is_cpu
    capacity = torch.cuda.get_device_properties(run.backend.device).total_memory if on_gpu else None
    return UserError(explain(run.config, run.plan.dims, rank=dist.get_rank(), on_gpu=on_gpu, capacity=capacity))


def _train(run: Run, stop: StopRequest, tracer: Tracer, watch: Watch) -> tuple[int, BaseException | None]:
    """Train and save; return the last iteration, and why it is not the run's last, equal on all ranks."""
    config, last = run.config, run.config.train.train_iters
    iteration = saved = run.position.iteration
    tally = _Tally(run.position.samples_read, run.position.samples_skipped)
    patience = Patience(run)
    guard = StepGuard(run, say=partial(_say, run))
    overdue = False  # a checkpoint is due, but the last step was bad
    saves = Saves(run, say=partial(_say, run), took=patience.save)
    end: BaseException | None = None
    while iteration < last and end is None:
        iteration += 1
        tracer.before(iteration)
        watch.begin_step(iteration)
        before = time.perf_counter()
        with profiler_range("data"):
            step = run.data_loader.next_step()
            encodes_ahead = config.placement.encode_ahead and iteration < last and not guard.leaves_out(iteration + 1)
            upcoming = run.data_loader.peek().batches if encodes_ahead else None
        ahead = _Ahead(run, counts_of(run, step), stop, needed=iteration < last)
        fetched = time.perf_counter() - before
        if guard.leaves_out(iteration):
            result = run.engine.leave_out(ahead.counters)
        else:
            result = run.engine.train_step(
                step.batches, ahead.counters, upcoming=upcoming, judge=guard.judge(iteration)
            )
        guard.note(result)
        counts = Counts(*result.counters)
        seconds = time.perf_counter() - before
        tracer.after(iteration)
        record = record_of(run, iteration, step, result, counts, data_time=fetched + ahead.waited, seconds=seconds)
        record |= watch.end_step(iteration, seconds)
        record["skipped_steps"] = guard.skipped
        run.skipped.write(iteration, step.skipped)
        tally.add(counts)
        if _due(iteration, config.evaluation.eval_interval) and iteration < last:
            record |= _interval_evaluation(run)
        record |= saves.news()
        for sink in run.sinks:
            sink.log(record)
        guard.act(iteration, step, result)
        patience.step(seconds)
        asked = counts.stop > 0
        overdue |= _due(iteration, config.checkpoint.save_interval)
        if overdue and guard.trusts_weights:
            saves.save(_position(run, iteration, tally, guard))
            saved, overdue = iteration, False
            asked = asked or _anywhere(stop.requested, run)  # during the save
        if iteration < last:
            end = ahead.error(counts) or tally.too_many_skipped(config.data.max_bad_sample_rate)
            end = end or (Stopped(stop.reason or "another rank was asked to stop") if asked else None)
    if saved != iteration:
        saves.save(_position(run, iteration, tally, guard))
    saves.finish()
    return iteration, end


@dataclass
class _Ahead:
    """What a rank reports at the end of a step: its counts, a request to stop, and a failure of its next data."""

    run: Run
    counts: Counts
    stop: StopRequest
    needed: bool  # whether there is a next step
    waited: float = 0.0  # seconds for the next step's data
    failure: BaseException | None = None

    def counters(self) -> Sequence[float]:
        """Return the counters of the step: all replicas hear of failed data before one waits for the rest."""
        before = time.perf_counter()
        if self.needed:
            self.failure = self.run.data_loader.failure_ahead(unless=lambda: self.stop.requested)
        self.waited = time.perf_counter() - before
        return replace(self.counts, stop=self.stop.requested, failed=self.failure is not None).values()

    def error(self, counts: Counts) -> BaseException | None:
        """Return the error of the next step's data, on all ranks; `counts` are the sums over them."""
        if not counts.failed:
            return None
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, None if self.failure is None else str(self.failure))
        return self.failure or UserError(next(error for error in errors if error is not None))


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


def close(run: Run) -> None:
    """Stop the data loader's workers, free the engine, close all files, and release the lock on the run folder."""
    run.data_loader.close()
    run.skipped.close()
    if run.saver is not None:
        run.saver.close()
    run.engine.close()
    for sink in run.sinks:
        sink.close()
    run.lock.release()


class Patience:
    """Says once, on rank 0, that a step and a save take longer than torchrun waits before it kills."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps: list[float] = []
        self._save = 0.0
        self._silent = run.progress is None or not under_torchrun()
        self._patience = torchrun_patience()

    def step(self, seconds: float) -> None:
        self._steps = [*self._steps[-2:], seconds]
        self._look()

    def save(self, seconds: float) -> None:
        self._save = seconds
        self._look()

    def _look(self) -> None:
        if self._silent or len(self._steps) < 3:
            return
        if line := patience_complaint(step=min(self._steps), save=self._save, patience=self._patience):
            self._silent = True
            _say(self._run, line)


@dataclass
class _Tally:
    """The numbers of samples that the whole run has read and skipped."""

    read: int
    skipped: int

    def add(self, counts: Counts) -> None:
        self.read += int(counts.read)
        self.skipped += int(counts.skipped)

    def too_many_skipped(self, most: float) -> UserError | None:
        """Return an error, equal on all ranks, if more than the share `most` of all samples was skipped."""
        if self.skipped < _LEAST_SKIPPED or self.skipped <= most * self.read:
            return None
        return UserError(
            f"{self.skipped} of {self.read} samples were skipped, more than --max-bad-sample-rate {most}: "
            "RUN_DIR/skipped lists each with its reason; repair the data, or raise the rate to continue"
        )


def _due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0


def _position(run: Run, iteration: int, tally: _Tally, guard: StepGuard) -> state.Position:
    return state.Position(
        iteration=iteration,
        loader=run.data_loader.state_dict(),
        samples_read=tally.read,
        samples_skipped=tally.skipped,
        bad_steps=guard.state_dict(),
    )


def _interval_evaluation(run: Run) -> dict[str, Value]:
    """Return the scores on a third of the final evaluation's questions; empty if the data have no questions."""
    if not isinstance(run.source, evaluate.Examiner):
        return {}
    questions = run.source.questions(max(1, run.config.evaluation.eval_samples // 3))
    run.engine.schedule.phases.enter(EVALUATION)
    predictions = evaluate.answer_all(
        run.engine,
        run.source,
        questions,
        spec=CollateSpec.of(run.config, run.source),
        micro_batch_size=run.config.train.micro_batch_size,
    )
    run.engine.schedule.phases.enter(OTHER)
    scores = evaluate.exact_match(questions, predictions)
    _say(run, "held-out exact match: " + ", ".join(f"{kind} {score:.0%}" for kind, score in scores.items()))
    return {f"eval_{kind.replace(' ', '_')}": score for kind, score in scores.items()}


def _final_evaluation(run: Run) -> None:
    if not isinstance(run.source, evaluate.Examiner):
        return
    run.engine.schedule.phases.enter(EVALUATION)
    _say(run, "answering held-out questions …")
    examination = evaluate.examine(
        run.engine,
        run.source,
        spec=CollateSpec.of(run.config, run.source),
        per_kind=run.config.evaluation.eval_samples,
        micro_batch_size=run.config.train.micro_batch_size,
    )
    if run.progress is not None:
        _say(run, evaluate.report(examination, run.run_dir))
        _say(run, f"examples: {run.run_dir / 'examples.png'}")


def _say(run: Run, text: str) -> None:
    if run.progress is not None:
        run.progress.message(text)
