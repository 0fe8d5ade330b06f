"""End a run that was asked to stop: all ranks after the same step, whichever of them was asked."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megavlm.errors import Stopped
from megavlm.resilience.signals import StopRequest
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.run import Run


class Stops(RankHook):
    """Knows whether any rank was asked to stop. Ranks hear of it by the sums of a step; what takes long looks anew."""

    def __init__(self, run: Run, stop: StopRequest) -> None:
        self._run, self._stop = run, stop
        self._heard = False  # since the sums of the last step, on all ranks

    @property
    def requested(self) -> bool:
        """Return whether this rank was asked."""
        return self._stop.requested

    def asked(self, step: Step) -> bool:
        """Return whether all ranks know, after a step, that one of them was asked."""
        return self._heard or step.counts.stop > 0

    def hear(self) -> None:
        """Note that one of the ranks was asked, as all of them know."""
        self._heard = True

    def look(self, step: Step) -> None:
        """Ask all ranks again, unless they know already; every rank calls it."""
        if not self.asked(step):
            found = torch.tensor(int(self.requested), device=self._run.backend.device)
            dist.all_reduce(found)
            self._heard = bool(found.item())

    def ends(self, step: Step) -> BaseException | None:
        """Return Stopped after a request, unless the run ends by itself."""
        if step.iteration == self._run.config.train.train_iters or not self.asked(step):
            return None
        return Stopped(self._stop.reason or self._run.callbacks.stop or "another rank was asked to stop")
