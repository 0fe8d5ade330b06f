"""Batch samplers: they choose the samples of each global batch, in an order that does not depend on the layout.

    samples ─ window of W ─ encoded, pixels not read ─ packed ─→ sequences ─ G per step ─→ global batches

Each window is packed independently, so which samples share a sequence depends on the seed and the window alone, and the
position in the data is two integers: the window, and how many of its sequences have been taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from megavlm.arch.packing import pack
from megavlm.data.skips import SkipSummary
from megavlm.data.types import EncodedRecord, GlobalBatch, LoaderState, Segment, Segments, Skipped
from megavlm.data.windows import Windows
from megavlm.errors import UserError

# Consecutive windows without a usable sample after which a run ends, if they do not hold every record before.
_EMPTY_WINDOWS = 4
_CLOSE = 10.0  # seconds that a window has to be done


class BatchSampler(Protocol):
    """Composes global batches. It keeps no position: the caller passes the state at which a batch begins."""

    @property
    def start(self) -> LoaderState:
        """Return the state before the first global batch."""
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

    def batch_at(self, state: LoaderState) -> GlobalBatch:
        first = state["consumed_samples"]
        sequences = tuple((Segment(number),) for number in range(first, first + self._count))
        return GlobalBatch(sequences, {"consumed_samples": first + self._count}, read=self._count)

    def close(self) -> None:
        """Do nothing, since no thread was started."""


@dataclass(frozen=True)
class Window:
    """The sequences of samples that were packed together, of how many that were read."""

    sequences: tuple[Segments, ...]
    read: int
    skipped: tuple[Skipped, ...]


class PackedBatchSampler:
    """Composes global batches of `count` sequences, packed window by window.

    `encode(w)` returns the encoded records of window w. It is called ahead of use, for one window, in a thread.
    """

    def __init__(
        self,
        encode: Callable[[int], Sequence[EncodedRecord]],
        *,
        count: int,
        windows: Windows,
        seq_length: int,
        packing: bool,
    ) -> None:
        self._encode = encode
        self._count = count
        self._divided = windows
        self._seq_length = seq_length
        self._packing = packing
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampler")
        self._windows: OrderedDict[int, Future[Window]] = OrderedDict()

    @property
    def start(self) -> LoaderState:
        start = {"window": 0, "taken": 0, "window_size": self._divided.size, "seq_length": self._seq_length}
        return start | ({"epoch": self._divided.epoch} if self._divided.within_epochs else {})

    def batch_at(self, state: LoaderState) -> GlobalBatch:
        """Return the global batch that begins at `state`.

        Raises UserError if no sample is usable, or if `state` counts windows of another size.
        """
        self._check(state)
        number, taken = state["window"], state["taken"]
        sequences: list[Segments] = []
        skipped: list[Skipped] = []
        read = empty = 0
        epochs: float | None = None
        while len(sequences) < self._count:
            window = self._window(number)
            if taken == 0:
                read += window.read
                skipped += window.skipped
            more = window.sequences[taken : taken + self._count - len(sequences)]
            sequences += more
            taken += len(more)
            empty = 0 if window.sequences else empty + 1
            if empty:
                self._stop_if_none(skipped, windows=empty)
            done = taken / max(len(window.sequences), 1)
            epochs = self._divided.epochs(number, done)
            if taken == len(window.sequences):
                number, taken = number + 1, 0
        after = {**self.start, "window": number, "taken": taken}
        return GlobalBatch(tuple(sequences), after, read, tuple(skipped), epochs)

    def _stop_if_none(self, skipped: Sequence[Skipped], *, windows: int) -> None:
        """Raise UserError after so many windows without a usable sample, or once every record was skipped."""
        lost = {skip.label: skip for skip in skipped if not skip.partly}
        every = bool(self._divided.epoch) and len(lost) >= (self._divided.epoch or 0)
        if every or windows == _EMPTY_WINDOWS:
            which = f"{len(lost):,} record{'s' if len(lost) > 1 else ''}"
            raise UserError(
                f"--datasets: none of the {'' if every else 'first '}{which} can be used: "
                f"{SkipSummary().add(lost.values()).told()}"
            )

    def forget(self) -> None:
        """Drop all buffered windows."""
        for window in self._windows.values():
            window.cancel()
        while self._windows:
            window = self._windows.popitem()[1]
            if not window.cancelled():
                window.exception()  # waits until a window that is being encoded is done

    def close(self) -> None:
        """Stop encoding ahead; a read that hangs is left to itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        wait([window for window in list(self._windows.values()) if not window.cancelled()], timeout=_CLOSE)

    def _check(self, state: LoaderState) -> None:
        for name, flag in (("window_size", "--packing-window"), ("seq_length", "--seq-length")):
            if state.get(name) != self.start[name]:
                raise UserError(
                    f"the checkpoint's position in the data counts with {flag} {state.get(name)}, now it is "
                    f"{self.start[name]}: go on with the former, or begin a new run (--load its weights)"
                )
        if state.get("epoch") != self.start.get("epoch"):
            raise UserError(
                f"the checkpoint's position in the data counts epochs of {state.get('epoch'):,.0f} samples, now they "
                f"have {self.start['epoch']:,.0f}: begin a new run (--load its weights)"
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

    def _make(self, number: int) -> Window:
        records = self._encode(number)
        encoded = [
            (record.sample_id, sample)
            for record in records
            if record.sample_id is not None
            for sample in record.samples
        ]
        lengths = [sample.cost.length for _, sample in encoded]
        bins = bins_of(lengths, seq_length=self._seq_length, packing=self._packing)
        return Window(
            sequences=tuple(tuple(Segment(*encoded[index]) for index in indices) for indices in bins),
            read=len(records),
            skipped=tuple(skip for record in records for skip in record.skipped),
        )


def bins_of(lengths: Sequence[int], *, seq_length: int, packing: bool) -> list[list[int]]:
    """Return the numbers of the samples of each sequence of a window, given their lengths in tokens."""
    return pack(lengths, seq_length) if packing else [[index] for index in range(len(lengths))]
