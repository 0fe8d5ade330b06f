"""Look at the first samples of a run's data, for what its micro-batches hold: no image is decoded or rendered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megavlm.arch.image_tokens import Grid
from megavlm.arch.workload import FIELDS, DataWindow, image_workload, sliding_squares
from megavlm.config.schema import Config
from megavlm.data.batch_sampler import bins_of
from megavlm.data.collate import CollateSpec
from megavlm.data.collator import FileCollator
from megavlm.data.costs import CostModel
from megavlm.data.files import FilesSource
from megavlm.data.skips import SkipSummary
from megavlm.data.source import ComputedSource
from megavlm.data.streaming import StreamSource
from megavlm.data.types import EncodedRecord
from megavlm.errors import UserError

STEPS = 4  # global batches of a window


@dataclass(frozen=True)
class _Sample:
    """The lengths of a sample."""

    length: int
    trained: int
    grids: tuple[Grid, ...]
    images: int


def data_window(config: Config, source: FilesSource | ComputedSource, *, records: int) -> DataWindow:
    """Return the work of `STEPS` global batches of a resolved configuration, from the first `records` of its data.

    Samples of files are packed as a run does it. If they make fewer sequences than the batches need, these are drawn
    from them with replacement, always in the same way.

    Raises UserError if the data cannot be opened, if they are streams, or if no sample can be used.
    """
    if isinstance(source, StreamSource):
        raise UserError("--datasets: tars of WebDataset are streams, which only a run reads")
    if isinstance(source, ComputedSource):
        rows = _computed(source, min(records, STEPS * config.train.global_batch_size))
        looked_at, unusable = len(rows), 0
    else:
        count = min(records, sum(map(len, source.records.values())))
        collator = FileCollator(source, CollateSpec.of(config, source))
        found = source.reads.wait(lambda: collator.encode(range(count)))
        rows, looked_at = _packed(config, found), len(found)
        unusable = sum(bool(record.skipped) and not record.samples for record in found)
    costs = CostModel.of(config.model)
    made = zip(*(_row(row, costs) for row in rows), strict=True)
    work, images, flops = (np.array(each, dtype=float) for each in made)
    size = STEPS, config.train.global_batch_size
    drawn = np.random.default_rng(0).integers(len(rows), size=size)
    chosen = np.arange(math.prod(size)).reshape(size) if len(rows) >= math.prod(size) else drawn
    return DataWindow(
        work=work[chosen],
        images=images[chosen],
        samples=np.array([len(row) for row in rows])[chosen],
        flops=flops[chosen],
        length=config.train.seq_length,
        sliding=config.model.language.window_size,
        balances=config.data.balance and not isinstance(source, ComputedSource),
        records=looked_at,
        unusable=unusable,
    )


def _computed(source: ComputedSource, count: int) -> list[list[_Sample]]:
    """Return the samples of sequences that are not packed; no image is rendered."""
    samples = [source.sample(index) for index in range(count)]
    return [
        [_Sample(len(each), int(each.trained[1:].sum()), each.grids, len(each.tile_groups or each.images))]
        for each in samples
    ]


def _packed(config: Config, records: Sequence[EncodedRecord]) -> list[list[_Sample]]:
    """Return the samples of each sequence that records are packed into. Raises UserError if there is none."""
    encoded = [sample for record in records for sample in record.samples]
    if not encoded:
        told = SkipSummary().add(skip for record in records for skip in record.skipped).told()
        raise UserError(f"--datasets: none of {len(records)} samples can be used: {told}")
    samples = [
        _Sample(
            each.cost.length,
            int(each.trained[1:].sum()),
            tuple(grid for image in each.images for grid in image.grids),
            each.cost.images,
        )
        for each in encoded
    ]
    lengths = [each.length for each in samples]
    bins = bins_of(lengths, seq_length=config.train.seq_length, packing=config.data.packing)
    return [[samples[index] for index in indices] for indices in bins]


def _row(samples: Sequence[_Sample], costs: CostModel) -> tuple[list[float], int, tuple[float, float]]:
    """Return the work [FIELDS] of a sequence, its images, and the forward FLOPs of its vision and language."""
    model = costs.model
    work = vars(image_workload([grid for each in samples for grid in each.grids], model)) | {
        "tokens": sum(each.length for each in samples),
        "token_squares": sum(each.length**2 for each in samples),
        "sliding_squares": sum(sliding_squares(each.length, model.language.window_size) for each in samples),
        "trained_tokens": sum(each.trained for each in samples),
    }
    each_cost = [costs.cost(length=each.length, grids=each.grids, images=each.images) for each in samples]
    flops = sum(cost.vision for cost in each_cost), sum(cost.language for cost in each_cost)
    return [work[name] for name in FIELDS], sum(each.images for each in samples), flops
