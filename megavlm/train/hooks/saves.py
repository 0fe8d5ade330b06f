"""Start asynchronous checkpoint saves during training and report their results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megavlm.checkpoint import folders, state
from megavlm.checkpoint.saving import SaveReport
from megavlm.errors import BadNumbers, UserError
from megavlm.metrics.callback import Saved, Value
from megavlm.resilience import events
from megavlm.resilience.events import write_status
from megavlm.resilience.phases import SAVE
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.hooks.step_guard import StepGuard
from megavlm.train.hooks.stops import Stops, Tally, TooManySkipped
from megavlm.train.run import Run

_WORTH_KEEPING = 100  # steps


class Saves(RankHook):
    """Begins saves, reports their results on rank 0, and measures how long they stall training."""

    def __init__(self, run: Run, tally: Tally, guard: StepGuard, stops: Stops) -> None:
        self._run, self._tally, self._guard, self._stops = run, tally, guard, stops
        self._saver = run.saver
        if self._saver is not None:
            self._saver.waits = partial(run.engine.schedule.phases.enter, SAVE, "waits for the writer")
        self._asynchronous = run.config.checkpoint.async_save
        self._interval = run.config.checkpoint.save_interval
        self._saved = run.position.iteration  # the last iteration of which a save has begun
        self._overdue = False  # a checkpoint is due, but the last step was bad
        self._record: Mapping[str, Value] = {}  # of the last step
        self._news: dict[str, Value] = {}
        self._last: SaveReport | None = None
        self._said = False  # warned that the metric of --keep-best is missing
        self._bad: BadNumbers | None = None  # on rank 0, and on a rank whose state is not finite

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Return new save metrics: the stall of a save that began, the seconds of one that ended. No rank waits."""
        self._look()
        news, self._news = self._news, {}
        return news

    def on_step_end(self, step: Step) -> None:
        """Begin a save if one is due and the last step was good.

        Raises BadNumbers, on all ranks, where an earlier save has found state that is not finite.
        """
        if isinstance(step.error, BadNumbers):
            raise step.error
        self._record = step.record
        self._overdue |= self._interval > 0 and step.iteration % self._interval == 0
        if self._overdue and self._guard.trusts_weights:
            self.save(self._position(step.iteration), step.record)
            self._saved, self._overdue = step.iteration, False
            self._stops.look(step)  # a save may have taken long

    def keeps(self, iteration: int) -> bool:
        """Return whether a run that ends because of bad data saves a checkpoint. A run that has hardly begun does not:
        its data position would make the corrected command fail, and nothing is lost.
        """
        return self._saver is not None and (self._saved > 0 or iteration >= _WORTH_KEEPING)

    def finish(self, iteration: int, end: BaseException | None) -> BaseException | None:
        """Save the last iteration unless it is saved or not worth keeping, and wait for the save in progress.

        Raises UserError on all ranks if the last save failed, BadNumbers if any found state that is not finite.
        """
        if self._saved != iteration and (not isinstance(end, TooManySkipped) or self.keeps(iteration)):
            self.save(self._position(iteration), self._record)
        if self._saver is None:
            return end
        self._run.engine.schedule.phases.enter(SAVE)
        self._saver.wait()
        self._look()
        self._end_if_bad()
        message = [None if self._last is None else self._last.error]
        dist.broadcast_object_list(message, src=0)
        if message[0] is not None:
            raise UserError(
                f"the last checkpoint cannot be saved to {self._run.run_dir / 'checkpoints'} ({message[0]}): the ones "
                "before it are whole; make room or choose another --run-dir, and start again"
            )
        return end

    def _position(self, iteration: int) -> state.Position:
        return state.Position(
            iteration=iteration,
            loader=self._run.data_loader.state_dict(),
            samples_read=self._tally.read,
            samples_skipped=self._tally.skipped,
            bad_steps=self._guard.state_dict(),
        )

    def save(self, position: state.Position, record: Mapping[str, Value]) -> None:
        """Begin a save; with --no-async-save, wait for its end. Every rank calls it. `record` has the step's metrics.

        Raises BadNumbers on all ranks if, with --no-async-save, the state is not finite.
        """
        if self._saver is None:
            return
        run = self._run
        run.engine.schedule.phases.enter(SAVE)
        if run.uploads is not None:
            run.uploads.ensure()
        began = time.perf_counter()
        state.save(
            run.engine.trained(),
            position,
            config=run.config,
            plan=run.plan,
            saver=self._saver,
            data=run.data_identity,
            metrics=self._metrics(record),
        )
        if not self._asynchronous:
            self._saver.wait()
        self._news["save_stall_s"] = time.perf_counter() - began
        self._look()
        if not self._asynchronous:
            self._end_if_bad()

    def _metrics(self, record: Mapping[str, Value]) -> dict[str, float]:
        """Return the loss, scores and the metric of --keep-best; print once if the record lacks that metric."""
        best = self._run.config.checkpoint.keep_best
        found = {
            name: float(value)
            for name, value in record.items()
            if (name in ("loss", best) or name.startswith("validation/")) and isinstance(value, (int, float))
        }
        if best is not None and best not in found and not self._said:
            self._said = True
            known = ", ".join(name for name, value in record.items() if isinstance(value, float))
            self._run.say(f"--keep-best {best}: iteration {record['iteration']} has no such number, but {known}")
        return found

    def bad(self) -> BadNumbers | None:
        """Return BadNumbers on a rank with a report of a save whose state is not finite, else None. No rank waits."""
        self._look()
        return self._bad

    def _end_if_bad(self) -> None:
        """Raise BadNumbers on all ranks if rank 0 has a report of state that is not finite."""
        shared: list[BadNumbers | None] = [self._bad]
        dist.broadcast_object_list(shared, src=0)
        if shared[0] is not None:
            raise shared[0]

    def _look(self) -> None:
        for report in self._saver.poll() if self._saver is not None else ():
            self._last = report
            if report.not_finite is not None and self._bad is None:
                before = folders.newest(report.folder.parent)
                self._bad = BadNumbers(
                    f"{report.not_finite} is not finite after iteration {report.iteration}, which is not saved; the "
                    f"last checkpoint is {before or 'none'}. Start from it with a lower --lr or with --clip-grad"
                )
            if dist.get_rank() == 0:
                self._tell(report)

    def _tell(self, report: SaveReport) -> None:
        run_dir: Path = self._run.run_dir
        seconds = round(report.seconds, 3)
        self._news["save_time_s"] = report.seconds
        if report.retried is not None:
            line = f"the save of iteration {report.iteration} failed once ({report.retried}), and was tried again"
            events.record(run_dir, "save_failed", iteration=report.iteration, reason=report.retried)
            self._run.say(line)
        if report.error is not None:
            what = "" if report.not_finite is None else " is not finite"
            reason = f"{report.error}{what}"
            events.record(run_dir, "save_failed", iteration=report.iteration, reason=reason, seconds=seconds)
            if report.not_finite is not None:  # the run is about to end, and says so
                return
            self._run.say(
                f"CHECKPOINT OF ITERATION {report.iteration} NOT SAVED: {report.error}. Training goes on; the "
                "checkpoints before it are whole"
            )
            return
        events.record(run_dir, "save", iteration=report.iteration, seconds=seconds, folder=report.folder)
        write_status(run_dir, "running", iteration=report.iteration, checkpoint=str(report.folder))
        self._run.say(f"saved {report.folder} in {report.seconds:.1f} s")
        self._run.callbacks.on_save(Saved(report.iteration, report.folder, report.seconds))
