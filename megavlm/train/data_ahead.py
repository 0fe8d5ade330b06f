"""Let all ranks hear, before they wait for one another, that the next step's data cannot be read on one of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from megavlm.errors import UserError
from megavlm.resilience.signals import StopRequest
from megavlm.train.build import Run
from megavlm.train.counts import Counts


@dataclass
class DataAhead:
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
