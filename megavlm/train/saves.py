"""Begin the saves of a run, which are written while training goes on, and report how they ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megavlm.checkpoint import folders, state
from megavlm.checkpoint.saving import SaveReport
from megavlm.errors import BadNumbers, UserError
from megavlm.metrics.callback import Saved, Value
from megavlm.resilience import events
from megavlm.resilience.phases import SAVE
from megavlm.resilience.status import write_status
from megavlm.train.build import Run


class Saves:
    """Begins saves, says on rank 0 how they ended, and measures for how long training stood still."""

    def __init__(self, run: Run, *, say: Callable[[str], None], took: Callable[[float], None]) -> None:
        """Prepare for saves; `took` will be called with the seconds of each."""
        self._run, self._say, self._took = run, say, took
        self._saver = run.saver
        if self._saver is not None:
            self._saver.waits = partial(run.engine.schedule.phases.enter, SAVE, "waits for the writer")
        self._asynchronous = run.config.checkpoint.async_save
        self._news: dict[str, Value] = {}
        self._last: SaveReport | None = None
        self._said = False  # that a metric is missing
        self._complete: list[Saved] = []  # on rank 0, of which callbacks have not heard
        self._bad: BadNumbers | None = None  # on rank 0, and on a rank whose state is not finite

    def save(self, position: state.Position, record: Mapping[str, Value]) -> None:
        """Begin a save; with --no-async-save, wait for its end. Every rank calls it. `record` has the step's metrics.

        Raises BadNumbers, on all ranks, where a save that was waited for found state that is not finite.
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
        """Return the loss, scores and the metric of --keep-best; says once if a step has no such number."""
        best = self._run.config.checkpoint.keep_best
        found = {
            name: float(value)
            for name, value in record.items()
            if (name in ("loss", best) or name.startswith("validation/")) and isinstance(value, (int, float))
        }
        if best is not None and best not in found and not self._said:
            self._said = True
            known = ", ".join(name for name, value in record.items() if isinstance(value, float))
            self._say(f"--keep-best {best}: iteration {record['iteration']} has no such number, but {known}")
        return found

    def bad(self) -> BadNumbers | None:
        """Return, on a rank that knows, that a save found state that is not finite: the run must end. No rank waits."""
        self._look()
        return self._bad

    def news(self) -> dict[str, Value]:
        """Return, for the record of the next step, what is new: the stall of a save that began, the time of one that
        ended. No rank waits.
        """
        self._look()
        news, self._news = self._news, {}
        return news

    def tell(self) -> None:
        """Tell the callbacks of checkpoints that are complete since the last call."""
        complete, self._complete = self._complete, []
        for saved in complete:
            self._run.callbacks.on_save(saved)

    def finish(self) -> None:
        """Wait for the save that is under way. Every rank calls it.

        Raises UserError on all if the last save failed, BadNumbers if any found state that is not finite.
        """
        if self._saver is None:
            return
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

    def _end_if_bad(self) -> None:
        """Raise BadNumbers on all ranks if rank 0 has heard of state that is not finite."""
        told: list[BadNumbers | None] = [self._bad]
        dist.broadcast_object_list(told, src=0)
        if told[0] is not None:
            raise told[0]

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
        self._took(report.seconds)
        if report.retried is not None:
            line = f"the save of iteration {report.iteration} failed once ({report.retried}), and was tried again"
            events.record(run_dir, "save_failed", iteration=report.iteration, reason=report.retried)
            self._say(line)
        if report.error is not None:
            what = "" if report.not_finite is None else " is not finite"
            reason = f"{report.error}{what}"
            events.record(run_dir, "save_failed", iteration=report.iteration, reason=reason, seconds=seconds)
            if report.not_finite is not None:  # the run is about to end, and says so
                return
            self._say(
                f"CHECKPOINT OF ITERATION {report.iteration} NOT SAVED: {report.error}. Training goes on; the "
                "checkpoints before it are whole"
            )
            return
        events.record(run_dir, "save", iteration=report.iteration, seconds=seconds, folder=report.folder)
        write_status(run_dir, "running", iteration=report.iteration, checkpoint=str(report.folder))
        self._say(f"saved {report.folder} in {report.seconds:.1f} s")
        self._complete.append(Saved(report.iteration, report.folder, report.seconds))
