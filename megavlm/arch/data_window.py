"""`DataWindow`: what the sequences of a few global batches hold, as a run's own data make them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megavlm.arch.workload import Workload, sliding_squares

Array = np.ndarray[Any, Any]
FIELDS = tuple(Workload.__dataclass_fields__)  # in the order of an array's last axis
TOKENS = FIELDS.index("tokens")


@dataclass(frozen=True, eq=False)
class DataWindow:
    """The work of the sequences of `steps` global batches, in the order of the data."""

    work: Array  # [steps, sequences, FIELDS], without padding
    images: Array  # [steps, sequences]
    samples: Array  # [steps, sequences]
    flops: Array  # [steps, sequences, 2] of a forward pass of vision and of language, by which a run balances
    length: int  # positions of a sequence, padding included
    sliding: int | None = None  # window of the language model's attention
    balances: bool = False  # whether a run gives ranks and micro-batches sequences by their FLOPs, or in turn
    records: int = 0  # that were looked at …
    unusable: int = 0  # … and of these those that a run skips

    @property
    def steps(self) -> int:
        return len(self.work)

    def computed(self, *, packed: bool) -> Array:
        """[steps, sequences, FIELDS]: the work with padding, which passes through the language model as text does.

        Padding attends to itself alone if any row of a micro-batch is `packed`; else a row is not taken apart.
        """
        found = self.work.copy()
        padding = self.length - found[..., TOKENS]
        squares, sliding = FIELDS.index("token_squares"), FIELDS.index("sliding_squares")
        found[..., TOKENS] = self.length
        if packed:
            slides = np.vectorize(lambda length: sliding_squares(int(length), self.sliding), otypes=[float])
            found[..., squares] += padding**2
            found[..., sliding] += slides(padding)
        else:
            found[..., squares], found[..., sliding] = self.length**2, sliding_squares(self.length, self.sliding)
        return found

    def total(self) -> Workload:
        """Return the work of a step in the mean, without padding."""
        return as_workload(self.work.sum(axis=1).mean(axis=0))

    def line(self) -> str:
        """Return the line that `tools/plan.py` prints: samples read, and images and patches of a sequence."""
        images, patches = self.images.ravel(), self.work[..., FIELDS.index("patches")].ravel()
        skipped = f" ({self.unusable:,} cannot be used)" if self.unusable else ""
        full = self.work[..., TOKENS].mean() / self.length
        return (
            f"looked at {self.records:,} samples{skipped}: a sequence has {images.min():.0f} to {images.max():.0f} "
            f"images of {patches.min():,.0f} to {patches.max():,.0f} patches in all, {patches.mean():,.0f} in the "
            f"mean; {full:.0%} of its positions are filled"
        )


def as_workload(values: Array) -> Workload:
    """Return [FIELDS] as a workload, rounded down."""
    return Workload(**{name: int(value) for name, value in zip(FIELDS, values, strict=True)})
