"""Look at the first samples of a run's data, for what its micro-batches hold: no image is decoded or rendered."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megavlm.arch.workload import FIELDS, DataWindow, image_workload, sliding_squares
from megavlm.config.schema import Config
from megavlm.data.costs import CostModel
from megavlm.data.source import Source
from megavlm.data.types import EncodedSample, Sample

STEPS = 4  # global batches of a window


def data_window(config: Config, source: Source, *, records: int) -> DataWindow:
    """Return the work of `STEPS` global batches of a resolved configuration, from the first `records` of its data.

    Samples of files are packed as a run does it. If they make fewer sequences than the batches need, these are drawn
    from them with replacement, always in the same way.

    Raises UserError if the data cannot be opened, if they are streams, or if no sample can be used.
    """
    first = source.first_sequences(config, records)
    rows = first.sequences
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
        balances=config.data.balance and source.is_read,
        records=first.records,
        unusable=first.unusable,
    )


def _row(samples: Sequence[Sample | EncodedSample], costs: CostModel) -> tuple[list[float], int, tuple[float, float]]:
    """Return the work [FIELDS] of a sequence, its images, and the forward FLOPs of its vision and language."""
    model = costs.model
    lengths = [len(each.tokens) for each in samples]
    images = [len(each.tile_groups or each.images) for each in samples]
    grids = [[grid for image in each.images for grid in image.grids] for each in samples]
    work = vars(image_workload([grid for each in grids for grid in each], model)) | {
        "tokens": sum(lengths),
        "token_squares": sum(length**2 for length in lengths),
        "sliding_squares": sum(sliding_squares(length, model.language.window_size) for length in lengths),
        "trained_tokens": sum(int(each.trained[1:].sum()) for each in samples),
    }
    of_each = zip(lengths, grids, images, strict=True)
    each_cost = [costs.cost(length=length, grids=grid, images=count) for length, grid, count in of_each]
    flops = sum(cost.vision for cost in each_cost), sum(cost.language for cost in each_cost)
    return [work[name] for name in FIELDS], sum(images), flops
