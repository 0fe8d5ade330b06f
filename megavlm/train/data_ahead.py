"""Let all ranks hear, before they wait for one another, of what must end the run and one of them knows.

That is data of the next step that cannot be read, a save that found state that is not finite, or a user's callback that
raised. A rank reports with the sums of a step whether its next data are there, late, or spoilt. So a step whose data
were prefetched in time waits for nothing and sends nothing more. Where some are late, all ranks wait for them after the
update has been launched, and one small sum more tells how it went.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megavlm.errors import BadNumbers, UserError
from megavlm.resilience.phases import COMMUNICATION, DATA, OTHER
from megavlm.resilience.signals import StopRequest
from megavlm.train.build import Run
from megavlm.train.counts import Counts
from megavlm.train.saves import Saves


@dataclass
class DataAhead:
    """What a rank reports at the end of a step: its counts, a request to stop, a failure of its next data or a save."""

    run: Run
    counts: Counts
    stop: StopRequest
    saves: Saves
    needed: bool  # whether there is a next step
    waited: float = 0.0  # seconds for the next step's data
    failure: BaseException | None = None

    def counters(self) -> Sequence[float]:
        """Return the counters of the step, without a wait."""
        late = self.needed and not self.run.data_loader.is_ahead()
        if self.needed and not late:
            self.failure = self._data_failure()
        self.failure = self.saves.bad() or self.run.callbacks.failure or self.failure
        stop = self.stop.requested or self.run.callbacks.stop is not None
        return replace(self.counts, stop=stop, failed=self.failure is not None, late=late).values()

    def settled(self, counts: Counts) -> Counts:
        """Return the sums over ranks once the next data of all are there or spoilt; every rank calls it.

        `counts` are the sums of the step. No rank waits for data of a run that is to end.
        """
        if not counts.late or counts.stop or counts.failed:
            return counts
        phases, before = self.run.engine.schedule.phases, time.perf_counter()
        phases.enter(DATA, "next step")
        self.failure = self._data_failure()
        self.waited = time.perf_counter() - before
        phases.enter(COMMUNICATION, "failures of the next data")
        sums = torch.tensor([self.failure is not None, self.stop.requested], dtype=torch.int32)
        sums = sums.to(self.run.backend.device)
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
        bad = isinstance(self.failure, BadNumbers)
        told: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, None if self.failure is None else (bad, str(self.failure)))
        errors = [each for each in told if each is not None]
        for is_bad, text in errors:
            if is_bad:
                return BadNumbers(text)
        return self.failure or UserError(errors[0][1])

    def _data_failure(self) -> BaseException | None:
        return self.run.data_loader.failure_ahead(unless=lambda: self.stop.requested)
