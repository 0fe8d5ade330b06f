"""The training loop: batches → step → record → evaluation → checkpoint, to the last iteration or a stop signal."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from megavlm.backend.profiler_range import profiler_range
from megavlm.checkpoint import state
from megavlm.data.collate import CollateSpec
from megavlm.errors import UserError
from megavlm.metrics.sinks import Value
from megavlm.train import evaluate
from megavlm.train.build import Run
from megavlm.train.record import Counts, counts_of, record_of
from megavlm.train.stopping import StopRequest
from megavlm.train.trace import Tracer

# A run with at most this many skipped samples goes on, whatever their share.
_LEAST_SKIPPED = 20


def fit(run: Run) -> None:
    """Train to the last iteration or a stop signal, save a checkpoint, and evaluate a run that finished.

    Raises UserError if too many samples were skipped.
    """
    stop = StopRequest()
    config = run.config
    iteration = saved = run.position.iteration
    tally = _Tally(run.position.samples_read, run.position.samples_skipped)
    tracer = Tracer(run.engine, config.logging, rank=dist.get_rank(), run_dir=run.run_dir, say=partial(_say, run))
    bad: str | None = None
    try:
        while iteration < config.train.train_iters:
            iteration += 1
            tracer.before(iteration, micro_batches=run.micro_batches)
            before = time.perf_counter()
            with profiler_range("data"):
                step = run.data_loader.next_step()
                ahead = config.placement.encode_ahead and iteration < config.train.train_iters
                upcoming = run.data_loader.peek().batches if ahead else None
            fetched = time.perf_counter()
            counters = counts_of(run, step, stop=stop.requested).values()
            result = run.engine.train_step(step.batches, counters, upcoming=upcoming)
            counts = Counts(*result.counters)
            seconds = time.perf_counter() - before
            tracer.after(iteration)
            record = record_of(run, iteration, step, result, counts, data_time=fetched - before, seconds=seconds)
            run.skipped.write(iteration, step.skipped)
            tally.add(counts)
            if _due(iteration, config.evaluation.eval_interval) and iteration < config.train.train_iters:
                record |= _interval_evaluation(run)
            for sink in run.sinks:
                sink.log(record)
            if _due(iteration, config.checkpoint.save_interval):
                saved = _save(run, iteration, tally)
            bad = tally.too_many_skipped(config.data.max_bad_sample_rate)
            if counts.stop or bad:
                break
        if saved != iteration:
            _save(run, iteration, tally)
        if bad:
            raise UserError(bad)
        finished = iteration >= config.train.train_iters
        _say(run, "finished" if finished else f"stopped at iteration {iteration}; the same command continues from here")
        if finished:
            _final_evaluation(run)
    finally:
        tracer.close()
        stop.restore()
        close(run)


def close(run: Run) -> None:
    """Stop the data loader's workers, free the engine and close all files."""
    run.data_loader.close()
    run.skipped.close()
    run.engine.close()
    for sink in run.sinks:
        sink.close()


@dataclass
class _Tally:
    """The numbers of samples that the whole run has read and skipped."""

    read: int
    skipped: int

    def add(self, counts: Counts) -> None:
        self.read += int(counts.read)
        self.skipped += int(counts.skipped)

    def too_many_skipped(self, most: float) -> str | None:
        """Return an error message, equal on all ranks, if more than the share `most` of all samples was skipped."""
        if self.skipped < _LEAST_SKIPPED or self.skipped <= most * self.read:
            return None
        return (
            f"{self.skipped} of {self.read} samples were skipped, more than --max-bad-sample-rate {most}: "
            "RUN_DIR/skipped lists each with its reason; repair the data, or raise the rate to continue"
        )


def _due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0


def _save(run: Run, iteration: int, tally: _Tally) -> int:
    if not run.config.checkpoint.save:
        return iteration
    began = time.perf_counter()
    position = state.Position(
        iteration=iteration,
        loader=run.data_loader.state_dict(),
        samples_read=tally.read,
        samples_skipped=tally.skipped,
    )
    folder = state.save(
        run.engine.trained(),
        position,
        config=run.config,
        plan=run.plan,
        root=run.run_dir / "checkpoints",
        keep=run.config.checkpoint.keep_checkpoints,
        data=run.data_identity,
    )
    _say(run, f"saved {folder} in {time.perf_counter() - began:.1f} s")
    return iteration


def _interval_evaluation(run: Run) -> dict[str, Value]:
    """Return the scores on a third of the final evaluation's questions; empty if the data have no questions."""
    if not isinstance(run.source, evaluate.Examiner):
        return {}
    questions = run.source.questions(max(1, run.config.evaluation.eval_samples // 3))
    predictions = evaluate.answer_all(
        run.engine,
        run.source,
        questions,
        spec=CollateSpec.of(run.config, run.source),
        micro_batch_size=run.config.train.micro_batch_size,
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
