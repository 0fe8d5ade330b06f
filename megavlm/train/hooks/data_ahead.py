"""Let all ranks hear, before they wait for one another, of what must end the run and one of them knows.

That is data of the next step that cannot be read, a save that found state that is not finite, or a user's callback that
raised. A rank reports with the sums of a step whether its next data are there, late, or spoilt. So a step whose data
were prefetched in time waits for nothing and sends nothing more. Where some are late, all ranks wait for them after the
update has been launched, and one small sum more tells how it went.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megavlm.errors import BadNumbers, UserError
from megavlm.resilience.phases import COMMUNICATION, DATA, OTHER
from megavlm.resilience.signals import StopRequest
from megavlm.train.counts import Counts
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.hooks.saves import Saves
from megavlm.train.run import Run


class DataAhead(RankHook):
    """What a rank reports at the end of a step: its counts, a request to stop, a failure of its next data or a save."""

    def __init__(self, run: Run, stop: StopRequest, saves: Saves) -> None:
        self._run, self._stop, self._saves = run, stop, saves
        self._needed = False  # whether there is a next step
        self._failure: BaseException | None = None
        self.waited = 0.0  # seconds for the next step's data

    def on_step_begin(self, iteration: int) -> None:
        """Begin to look at the data of the next step."""
        self._needed = iteration < self._run.config.train.train_iters
        self._failure, self.waited = None, 0.0

    def counters(self, counts: Counts) -> Sequence[float]:
        """Return the counters of a step with these counts, without a wait."""
        late = self._needed and not self._run.data_loader.is_ahead()
        if self._needed and not late:
            self._failure = self._data_failure()
        self._failure = self._saves.bad() or self._run.callbacks.failure or self._failure
        stop = self._stop.requested or self._run.callbacks.stop is not None
        return replace(counts, stop=stop, failed=self._failure is not None, late=late).values()

    def settled(self, counts: Counts) -> Counts:
        """Return the sums over ranks once the next data of all are there or spoilt; every rank calls it.

        `counts` are the sums of the step. No rank waits for data of a run that is to end.
        """
        if not counts.late or counts.stop or counts.failed:
            return counts
        phases, before = self._run.engine.schedule.phases, time.perf_counter()
        phases.enter(DATA, "next step")
        self._failure = self._data_failure()
        self.waited = time.perf_counter() - before
        phases.enter(COMMUNICATION, "failures of the next data")
        sums = torch.tensor([self._failure is not None, self._stop.requested], dtype=torch.int32)
        sums = sums.to(self._run.backend.device)
        dist.all_reduce(sums)
        failed, stop = sums.tolist()
        phases.enter(OTHER)
        return replace(counts, failed=failed, stop=stop)

    def error(self, counts: Counts) -> BaseException | None:
        """Return what must end the run, on all ranks; `counts` are the settled sums over them.

        It is BadNumbers on all ranks if it is so on any.
        """
        if not counts.failed:
            return None
        bad = isinstance(self._failure, BadNumbers)
        told: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, None if self._failure is None else (bad, str(self._failure)))
        errors = [each for each in told if each is not None]
        for is_bad, text in errors:
            if is_bad:
                return BadNumbers(text)
        return self._failure or UserError(errors[0][1])

    def ends(self, step: Step) -> BaseException | None:
        """Return the error of a step, unless no data are needed any more."""
        return step.error if self._needed else None

    def _data_failure(self) -> BaseException | None:
        return self._run.data_loader.failure_ahead(unless=lambda: self._stop.requested)
