"""Run the training loop, with hooks around each step, to the last iteration or a request to stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist

from megavlm.errors import Stopped, UserError
from megavlm.resilience import events
from megavlm.resilience.signals import StopRequest
from megavlm.resilience.status import State, note_failure, write_status
from megavlm.train.hooks.held_out import final_evaluation
from megavlm.train.hooks.order import Hooks, hooks_of
from megavlm.train.run import Run
from megavlm.train.step import take_step


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
            stop.saved()
            final_evaluation(run)
            if not _finish_uploads(run):
                raise UserError(
                    f"not all checkpoints are copied to --checkpoint-dir {run.config.checkpoint.checkpoint_dir} "
                    "(RUN_DIR/events.jsonl says why): the same command copies the rest"
                )
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
