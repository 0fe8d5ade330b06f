"""Let all ranks hear, before they wait for one another, of what must end the run and one of them knows.

That is data of the next step that cannot be read, or a save that found state that is not finite.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from megavlm.errors import BadNumbers, UserError
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
        """Return the counters of the step: all replicas hear of failed data before one waits for the rest."""
        before = time.perf_counter()
        if self.needed:
            self.failure = self.run.data_loader.failure_ahead(unless=lambda: self.stop.requested)
        self.waited = time.perf_counter() - before
        self.failure = self.saves.bad() or self.failure
        return replace(self.counts, stop=self.stop.requested, failed=self.failure is not None).values()

    def error(self, counts: Counts) -> BaseException | None:
        """Return what must end the run, on all ranks; `counts` are the sums over them.

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
