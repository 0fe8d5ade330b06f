"""Divide the stream of samples into packing windows, and say how many epochs a place in it is. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Windows:
    """Window w is a range of samples that are packed together.

    An epoch is as many samples as the data sets have records. Runs of `--epochs` have windows `within_epochs`, which
    end where an epoch ends, so that each of its samples is packed, and trained on, once before the next epoch begins.
    """

    size: int  # samples of the largest window
    epoch: float | None = None  # samples of an epoch, of those that this rank's sampler reads; None: not known
    within_epochs: bool = False

    def samples(self, number: int) -> range:
        """Return the numbers of the samples of a window."""
        return range(self._start(number), self._start(number + 1))

    def epochs(self, number: int, fraction: float = 0.0) -> float | None:
        """Return how many epochs lie before a place in the data: a window, and the fraction of it that is done."""
        if not self.epoch:
            return None
        start, end = self._start(number), self._start(number + 1)
        return (start + fraction * (end - start)) / self.epoch

    def _start(self, number: int) -> int:
        if not self.within_epochs:
            return number * self.size
        epoch, place = divmod(number, self.per_epoch)
        whole = self._whole
        return epoch * whole + place * whole // self.per_epoch

    @property
    def per_epoch(self) -> int:
        """Return the number of windows of an epoch that they do not exceed: as few, and as even, as possible."""
        return -(-self._whole // self.size)

    @property
    def _whole(self) -> int:
        assert self.epoch, "only data sets with an end have windows within epochs"
        return int(self.epoch)
