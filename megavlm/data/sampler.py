"""Define batch samplers, which choose the samples of each global batch independently of the layout.

    samples ─ window of W ─ encoded, pixels not read ─ packed ─→ sequences ─ G per step ─→ global batches

Each window is packed independently, so the composition of sequences depends on the seed and the window alone. The
position in the data is two integers: the window, and the number of its sequences that have been taken.

A validation pass reads each validation sample once, in its own global batches. The last batch is filled up with empty
sequences, which have no tokens and no loss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Protocol

from megavlm.arch.packing import pack
from megavlm.data.types import EncodedRecord, GlobalBatch, HeldOut, LoaderState, Segment, Segments
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import Skipped, SkipSummary

# Consecutive windows without a usable sample after which a run ends. It ends earlier if every record was skipped.
_EMPTY_WINDOWS = 4
_CLOSE = 10.0  # seconds that `close` waits for windows in progress
BEGIN_WITH_WEIGHTS = "export the weights and begin a new run with them (--init-from)"  # `--load` goes on in the data


@dataclass(frozen=True)
class Windows:
    """Division of the samples into windows, ranges of consecutive samples that are packed together.

    An epoch is as many samples as the data sets have records. Runs of `--epochs` have windows `within_epochs`: no
    window crosses the end of an epoch, so that each sample of an epoch is packed and trained before the next begins.
    """

    size: int  # samples of the largest window
    epoch: int | None = None  # samples of an epoch; None: not known
    within_epochs: bool = False

    def samples(self, number: int) -> range:
        """Return the numbers of the samples of a window."""
        return range(self._start(number), self._start(number + 1))

    def epochs(self, number: int, fraction: float = 0.0) -> float | None:
        """Return the number of epochs before a position in the data: window `number` and the fraction of it done.

        Returns None if the length of an epoch is not known.
        """
        if not self.epoch:
            return None
        start, end = self._start(number), self._start(number + 1)
        return (start + fraction * (end - start)) / self.epoch

    def _start(self, number: int) -> int:
        if not self.within_epochs:
            return number * self.size
        assert self.epoch, "only data sets with an end have windows within epochs"
        epoch, place = divmod(number, self.per_epoch)
        return epoch * self.epoch + place * self.epoch // self.per_epoch

    @property
    def per_epoch(self) -> int:
        """Return the number of windows per epoch if windows end with epochs: the fewest of at most `size` samples."""
        assert self.epoch, "only data sets with an end have windows within epochs"
        return -(-self.epoch // self.size)


class BatchSampler(Protocol):
    """Composes global batches. A batch sampler keeps no position: the caller passes the state where a batch begins."""

    @property
    def start(self) -> LoaderState:
        """Return the state before the first global batch."""
        ...

    def check(self, state: LoaderState) -> None:
        """Raise UserError if a saved state has no meaning for these data."""
        ...

    def batch_at(self, state: LoaderState) -> GlobalBatch:
        """Return the global batch that begins at `state`."""
        ...

    def close(self) -> None: ...


class SequentialBatchSampler:
    """Takes samples by number, unpacked: sample k·G + j is sequence j of global batch k."""

    def __init__(self, *, count: int) -> None:
        self._count = count

    @property
    def start(self) -> LoaderState:
        return {"consumed_samples": 0}

    def check(self, state: LoaderState) -> None:
        """Accept any state."""

    def batch_at(self, state: LoaderState) -> GlobalBatch:
        first = state["consumed_samples"]
        sequences = tuple((Segment(number),) for number in range(first, first + self._count))
        return GlobalBatch(sequences, {"consumed_samples": first + self._count}, read=self._count)

    def close(self) -> None:
        """Do nothing, since no thread was started."""


@dataclass(frozen=True)
class Window:
    """The packed sequences of a window, with the number of samples read and the reports of those skipped."""

    sequences: tuple[Segments, ...]
    read: int
    skipped: tuple[Skipped, ...]


class PackedBatchSampler:
    """Composes global batches of `count` sequences, packed window by window.

    `make(w)` returns window w. A thread calls it one window ahead of use.
    """

    def __init__(self, make: Callable[[int], Window], *, count: int, windows: Windows, seq_length: int) -> None:
        self._make = make
        self._count = count
        self._divided = windows
        self._seq_length = seq_length
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampler")
        self._windows: OrderedDict[int, Future[Window]] = OrderedDict()

    @property
    def start(self) -> LoaderState:
        start = {"window": 0, "taken": 0, "window_size": self._divided.size, "seq_length": self._seq_length}
        return start | ({"epoch": self._divided.epoch} if self._divided.within_epochs else {})

    def batch_at(self, state: LoaderState) -> GlobalBatch:
        """Return the global batch that begins at `state`. Raises UserError if no sample is usable."""
        return self._taken(state)

    def _taken(self, state: LoaderState, *, end: int | None = None) -> GlobalBatch:
        """Return the global batch of the next `count` sequences from `state` on, or of fewer before window `end`."""
        number, taken = state["window"], state["taken"]
        sequences: list[Segments] = []
        skipped: list[Skipped] = []
        read = empty = 0
        epochs: float | None = None
        while len(sequences) < self._count and number != end:
            window = self._window(number)
            if taken == 0:
                read += window.read
                skipped += window.skipped
            more = window.sequences[taken : taken + self._count - len(sequences)]
            sequences += more
            taken += len(more)
            empty = 0 if window.sequences else empty + 1
            if empty and end is None:
                self._stop_if_none(skipped, windows=empty)
            epochs = self._divided.epochs(number, taken / max(len(window.sequences), 1))
            if taken == len(window.sequences):
                number, taken = number + 1, 0
        after = {**self.start, "window": number, "taken": taken}
        return GlobalBatch(tuple(sequences), after, read, tuple(skipped), epochs)

    def _stop_if_none(self, skipped: Sequence[Skipped], *, windows: int) -> None:
        """Raise UserError if `windows` windows without a usable sample are too many, or every record was skipped."""
        lost = {skip.label: skip for skip in skipped if not skip.partly}
        every = bool(self._divided.epoch) and len(lost) >= (self._divided.epoch or 0)
        if windows == _EMPTY_WINDOWS and not lost:
            raise UserError(
                f"--validation-split holds out all records of {windows} windows: lower it, or raise --packing-window"
            )
        if every or windows == _EMPTY_WINDOWS:
            which = f"{len(lost):,} record{'s' if len(lost) > 1 else ''}"
            raise UserError(
                f"--datasets: none of the {'' if every else 'first '}{which} can be used: "
                f"{SkipSummary().add(lost.values()).message()}"
            )

    def close(self) -> None:
        """Stop encoding ahead; a hanging read is abandoned after a timeout."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        wait([window for window in list(self._windows.values()) if not window.cancelled()], timeout=_CLOSE)

    def check(self, state: LoaderState) -> None:
        """Raise UserError if `state` counts windows or epochs of another size."""
        for name, flag in (("window_size", "--packing-window"), ("seq_length", "--seq-length")):
            if state.get(name) != self.start.get(name):
                raise UserError(
                    f"the checkpoint's position in the data counts with {flag} {state.get(name)}, now it is "
                    f"{self.start[name]}: go on with the former, or {BEGIN_WITH_WEIGHTS}"
                )
        if state.get("epoch") != self.start.get("epoch"):
            raise UserError(
                f"the checkpoint's position in the data counts epochs of {state.get('epoch'):,.0f} samples, now they "
                f"have {self.start['epoch']:,.0f}: {BEGIN_WITH_WEIGHTS}"
            )

    def _window(self, number: int) -> Window:
        wanted = [self._prepared(number), self._prepared(number + 1)]
        while len(self._windows) > len(wanted):
            self._windows.popitem(last=False)[1].cancel()
        return wanted[0].result()

    def _prepared(self, number: int) -> Future[Window]:
        if number not in self._windows:
            self._windows[number] = self._thread.submit(self._make, number)
        self._windows.move_to_end(number)
        return self._windows[number]


class ValidationBatchSampler(PackedBatchSampler):
    """Composes global batches of `count` sequences of the validation samples, and starts over after the last batch."""

    def __init__(
        self,
        samples: Sequence[HeldOut],
        pack: Callable[[Sequence[HeldOut]], Window],
        *,
        count: int,
        multiple: int,
        most: int | None,
        size: int,
        seq_length: int,
    ) -> None:
        """Prepare the sampler. `pack` makes a window of `size` samples. The number of sequences of a batch is a
        multiple of `multiple`, and a validation pass has at most `most` batches.
        """
        super().__init__(
            lambda number: pack(samples[number * size : (number + 1) * size]),
            count=count,
            windows=Windows(size),
            seq_length=seq_length,
        )
        self._number_of_windows = -(-len(samples) // size)
        self._multiple = multiple
        self._most = most

    @property
    def start(self) -> LoaderState:
        return {"window": 0, "taken": 0, "batch": 0}

    def batch_at(self, state: LoaderState) -> GlobalBatch:
        found, batch = self._taken(state, end=self._number_of_windows), state["batch"] + 1
        last = found.after["window"] == self._number_of_windows or batch == self._most
        count = max(len(found.sequences), 1)
        filled = found.sequences + ((),) * (count + -count % self._multiple - len(found.sequences))
        after = self.start if last else {**found.after, "batch": batch}
        return replace(found, sequences=filled, after=after, last=last)

    def _prepared(self, number: int) -> Future[Window]:
        return super()._prepared(number % self._number_of_windows)


def window_of(records: Sequence[EncodedRecord], *, seq_length: int, packing: bool) -> Window:
    """Return a window with its encoded records packed into sequences, or one sample per sequence without `packing`."""
    encoded = [
        (record.sample_id, sample) for record in records if record.sample_id is not None for sample in record.samples
    ]
    bins = bins_of([sample.cost.length for _, sample in encoded], seq_length=seq_length, packing=packing)
    return Window(
        sequences=tuple(tuple(Segment(*encoded[index]) for index in indices) for indices in bins),
        read=len(records),
        skipped=tuple(skip for record in records for skip in record.skipped),
    )


def bins_of(lengths: Sequence[int], *, seq_length: int, packing: bool) -> list[list[int]]:
    """Return the sample indices of each sequence of a window, given the samples' lengths in tokens."""
    return pack(lengths, seq_length) if packing else [[index] for index in range(len(lengths))]
