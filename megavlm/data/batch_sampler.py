"""Which samples make the next global batch, in an order that no layout changes.

    stream of samples ─ window of W ─ measured, without pixels ─ packed ─→ sequences ─ G per step ─→ global batches

A window is packed on its own, so which samples share a sequence depends on the seed and the window alone, and the
place in the data is two integers: the window, and how many of its sequences have been handed out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from megavlm.data.bad import Reason
from megavlm.data.costs import SampleCost
from megavlm.data.packing import pack
from megavlm.errors import UserError

LoaderState = dict[str, Any]  # where the next global batch begins, as a checkpoint keeps it: plain data

# Windows without a single usable sample before giving up.
_EMPTY_WINDOWS = 4


@dataclass(frozen=True)
class Skipped:
    """A sample that is left out, or (`partly`) of which something is."""

    label: str  # as in `train.jsonl:18`
    source: str
    reason: Reason
    detail: str
    partly: bool = False


@dataclass(frozen=True)
class Segment:
    """A piece of a sample in a sequence; most samples are one piece. The source knows samples by their `item`."""

    item: Any
    piece: int = 0
    measure: SampleCost | None = None


Segments = tuple[Segment, ...]  # what one sequence holds


@dataclass(frozen=True)
class Measured:
    """A sample as its pieces, and what was left out of it."""

    item: Any
    pieces: tuple[SampleCost, ...]
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class GlobalBatch:
    """The sequences of one global batch; `read` samples and `skipped` of the windows that it was the first to open."""

    sequences: tuple[Segments, ...]
    after: LoaderState
    read: int
    skipped: tuple[Skipped, ...] = ()


class BatchSampler(Protocol):
    """Global batches from any place on."""

    @property
    def start(self) -> LoaderState: ...

    def batch_at(self, place: LoaderState) -> GlobalBatch: ...

    def close(self) -> None: ...


class SequentialBatchSampler:
    """Sample k·G + j is sequence j of global batch k."""

    def __init__(self, *, count: int) -> None:
        self._count = count

    @property
    def start(self) -> LoaderState:
        return {"consumed_samples": 0}

    def batch_at(self, place: LoaderState) -> GlobalBatch:
        first = place["consumed_samples"]
        sequences = tuple((Segment(item),) for item in range(first, first + self._count))
        return GlobalBatch(sequences, {"consumed_samples": first + self._count}, read=self._count)

    def close(self) -> None:
        """Nothing runs on."""


@dataclass(frozen=True)
class _Window:
    sequences: tuple[Segments, ...]
    read: int
    skipped: tuple[Skipped, ...]


class PackedBatchSampler:
    """Global batches of `count` sequences, packed window by window.

    `measure(w)` gives the samples of window w; it is asked for the next window while the current one is used.
    """

    def __init__(
        self,
        measure: Callable[[int], Sequence[Measured]],
        *,
        count: int,
        window: int,
        seq_length: int,
        packing: bool,
    ) -> None:
        self._measure = measure
        self._count = count
        self._size = window
        self._seq_length = seq_length
        self._packing = packing
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampler")
        self._windows: OrderedDict[int, Future[_Window]] = OrderedDict()

    @property
    def start(self) -> LoaderState:
        return {"window": 0, "taken": 0, "window_size": self._size, "seq_length": self._seq_length}

    def batch_at(self, place: LoaderState) -> GlobalBatch:
        """The global batch at `place`.

        Raises UserError where nothing of the data can be used, and for a place in windows of another kind.
        """
        self._check(place)
        number, taken = place["window"], place["taken"]
        sequences: list[Segments] = []
        skipped: list[Skipped] = []
        read = empty = 0
        while len(sequences) < self._count:
            window = self._window(number)
            if taken == 0:
                read += window.read
                skipped += window.skipped
            more = window.sequences[taken : taken + self._count - len(sequences)]
            sequences += more
            taken += len(more)
            empty = 0 if window.sequences else empty + 1
            if empty == _EMPTY_WINDOWS:
                raise UserError(f"--datasets: none of {read} samples can be used: {_summary(skipped)}")
            if taken == len(window.sequences):
                number, taken = number + 1, 0
        return GlobalBatch(tuple(sequences), {**self.start, "window": number, "taken": taken}, read, tuple(skipped))

    def forget(self) -> None:
        """Drop the windows that are at hand."""
        for window in self._windows.values():
            window.cancel()
        while self._windows:
            window = self._windows.popitem()[1]
            if not window.cancelled():
                window.exception()  # waits for the one that is being made

    def close(self) -> None:
        """Stop measuring ahead."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _check(self, place: LoaderState) -> None:
        for name, flag in (("window_size", "--packing-window"), ("seq_length", "--seq-length")):
            if place.get(name) != self.start[name]:
                raise UserError(
                    f"the checkpoint's place in the data was counted with {flag} {place.get(name)}, now it is "
                    f"{self.start[name]}: go on with the former, or begin a new run (--load its weights)"
                )

    def _window(self, number: int) -> _Window:
        wanted = [self._prepared(number), self._prepared(number + 1)]
        while len(self._windows) > len(wanted):
            self._windows.popitem(last=False)[1].cancel()
        return wanted[0].result()

    def _prepared(self, number: int) -> Future[_Window]:
        if number not in self._windows:
            self._windows[number] = self._thread.submit(self._make, number)
        self._windows.move_to_end(number)
        return self._windows[number]

    def _make(self, number: int) -> _Window:
        measured = self._measure(number)
        members = [
            Segment(sample.item, piece, measure) for sample in measured for piece, measure in enumerate(sample.pieces)
        ]
        bins = [[place] for place in range(len(members))]
        if self._packing:
            bins = pack([measure.length for sample in measured for measure in sample.pieces], self._seq_length)
        return _Window(
            sequences=tuple(tuple(members[place] for place in places) for places in bins),
            read=len(measured),
            skipped=tuple(skip for sample in measured for skip in sample.skipped),
        )


def _summary(skipped: Sequence[Skipped]) -> str:
    """The commonest reason, and a sample of it."""
    reasons = [skip.reason for skip in skipped]
    commonest = max(sorted(set(reasons)), key=reasons.count)
    example = next(skip for skip in skipped if skip.reason is commonest)
    return f"{reasons.count(commonest)} × {commonest}, as {example.label}: {example.detail}"
