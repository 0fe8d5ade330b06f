"""Count what a step's data are, and what the whole run has read; sums over ranks travel with the step's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megavlm.arch.workload import image_workload, sliding_squares
from megavlm.config.schema import Config
from megavlm.data.rank_loader import stats
from megavlm.data.skips import SkipSummary
from megavlm.data.types import Skipped, StepData
from megavlm.errors import UserError
from megavlm.train.build import Run

# A run with at most this many skipped samples goes on, whatever their share.
_LEAST_SKIPPED = 20


@dataclass(frozen=True)
class Counts:
    """Counts of a global batch, which the all-reduce of the training step sums over ranks."""

    tokens: float = 0
    positions: float = 0
    image_tokens: float = 0
    images: float = 0
    patches: float = 0
    patch_squares: float = 0
    window_squares: float = 0
    features: float = 0
    token_squares: float = 0
    sliding_squares: float = 0
    read: float = 0  # samples read, including skipped ones
    skipped: float = 0  # samples skipped
    split: float = 0  # samples of which a part was skipped
    stop: float = 0  # ranks that were asked to stop
    failed: float = 0  # replicas whose next data cannot be read
    late: float = 0  # replicas whose next data are not read yet

    def values(self) -> Sequence[float]:
        return [float(getattr(self, each.name)) for each in fields(self)]


def counts_of(run: Run, step: StepData) -> Counts:
    """Return this rank's counts of a batch: one rank of each replica counts it."""
    if not run.engine.groups.is_reader:
        return Counts()
    counted = stats(step.batches)
    grids = [grid for batch in step.batches for grid in batch.image_sizes.grids]
    images = image_workload(grids, run.config.model)
    lengths = [length for batch in step.batches for length in batch.text.lengths]
    return Counts(
        tokens=counted.tokens,
        positions=counted.positions,
        image_tokens=counted.image_tokens,
        images=counted.images,
        patches=images.patches,
        patch_squares=images.patch_squares,
        window_squares=images.window_squares,
        features=images.features,
        token_squares=sum(length * length for length in lengths),
        sliding_squares=sum(sliding_squares(length, run.config.model.language.window_size) for length in lengths),
        read=step.read,
        skipped=sum(not skip.partly for skip in step.skipped),
        split=sum(skip.partly for skip in step.skipped),
    )


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

    def too_many_skipped(self, config: Config, *, keeps: bool) -> TooManySkipped | None:
        """Return an error, equal on all ranks, if a larger share of the samples was skipped than the user allows.

        `keeps` says whether a checkpoint will be there to go on from. Every rank calls it.
        """
        most = config.data.max_bad_sample_rate
        if self.skipped_now < _LEAST_SKIPPED or self.skipped_now <= most * self.read_now:
            return None
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.reasons)
        after = "continues, with --accept-changed-data if it changes the data" if keeps else "begins anew"
        return TooManySkipped(
            f"{self.skipped_now} of {self.read_now} samples were skipped, more than --max-bad-sample-rate {most}: "
            f"{SkipSummary().merged(found).told()}. {Path(config.run.run_dir) / 'skipped'} lists all; the mended "
            f"command {after}"
        )
