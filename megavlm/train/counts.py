"""Count what a step's data are; sums over ranks travel with the step's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megavlm.arch.workload import image_workload, sliding_squares
from megavlm.config.model_schema import ModelConfig
from megavlm.data.loader import stats
from megavlm.data.types import StepData
from megavlm.parallel.groups import Groups


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


def counts_of(step: StepData, groups: Groups, model: ModelConfig) -> Counts:
    """Return this rank's counts of a batch: one rank of each replica counts it."""
    if not groups.is_reader:
        return Counts()
    counted = stats(step.batches)
    grids = [grid for batch in step.batches for grid in batch.image_sizes.grids]
    images = image_workload(grids, model)
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
        sliding_squares=sum(sliding_squares(length, model.language.window_size) for length in lengths),
        read=step.read,
        skipped=sum(not skip.partly for skip in step.skipped),
        split=sum(skip.partly for skip in step.skipped),
    )
