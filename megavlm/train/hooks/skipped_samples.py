"""Count and list the samples that were skipped, and end a run of which too many were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megavlm.data.skips import SkipSummary
from megavlm.data.types import Skipped
from megavlm.errors import UserError
from megavlm.metrics.callback import Value
from megavlm.train.counts import Counts
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.run import Run

# A run with at most this many skipped samples goes on, whatever their share.
_LEAST_SKIPPED = 20


class TooManySkipped(UserError):
    """More samples were skipped than `--max-bad-sample-rate` allows."""


@dataclass
class Tally:
    """The numbers of samples that the whole run has read and skipped, and those since its last start.

    These alone may end it: the data may have been mended before.
    """

    read: int
    skipped: int
    read_now: int = 0
    skipped_now: int = 0
    reasons: SkipSummary = field(default_factory=SkipSummary)  # of the samples that this rank has read

    def add(self, counts: Counts, skipped: Sequence[Skipped]) -> None:
        """Add the counts of a step over all ranks, and the skipped samples of this one."""
        self.read += int(counts.read)
        self.skipped += int(counts.skipped)
        self.read_now += int(counts.read)
        self.skipped_now += int(counts.skipped)
        self.reasons.add(skipped)


class SkippedSamples(RankHook):
    """Tallies what each step has read and skipped, and writes this rank's skipped samples to RUN_DIR/skipped."""

    def __init__(self, run: Run, tally: Tally, *, keeps: Callable[[int], bool]) -> None:
        """`keeps` returns whether there will be a checkpoint to go on from if the run ends after an iteration."""
        self._run, self._tally, self._keeps = run, tally, keeps

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Tally a step, and write down what it has skipped."""
        self._tally.add(step.counts, step.data.skipped if self._run.engine.groups.is_reader else ())
        self._run.skipped.write(step.iteration, step.data.skipped)
        return {}

    def ends(self, step: Step) -> BaseException | None:
        """Return an error if a larger share of the samples was skipped than the user allows."""
        tally, most = self._tally, self._run.config.data.max_bad_sample_rate
        if tally.skipped_now < _LEAST_SKIPPED or tally.skipped_now <= most * tally.read_now:
            return None
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, tally.reasons)
        keeps = self._keeps(step.iteration)
        after = "continues, with --accept-changed-data if it changes the data" if keeps else "begins anew"
        return TooManySkipped(
            f"{tally.skipped_now} of {tally.read_now} samples were skipped, more than --max-bad-sample-rate {most}: "
            f"{SkipSummary().merged(found).message()}. {self._run.run_dir / 'skipped'} lists all; the mended "
            f"command {after}"
        )
