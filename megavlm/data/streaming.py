"""Data that can only be read forward (WebDataset), in windows, with the place from which each window was read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megavlm.data.bad import BadSample
from megavlm.data.batch_sampler import GlobalBatch, LoaderState, Measured, PackedBatchSampler, Skipped
from megavlm.data.collator import Collator
from megavlm.data.conversation import Conversation
from megavlm.data.files import FilesSource, StreamSample

if TYPE_CHECKING:
    from megavlm.data.records.energon import EnergonStream

# Samples of a stream that are held at a time, with their images, to be packed.
MAX_STREAM_WINDOW = 512


class StreamReader:
    """What data-parallel rank `rank` of `ranks` reads of a blend in which some data sets are streams.

    The rank's n-th sample is sample n·ranks + rank of the blend: where that comes from numbered records it is that
    record, where it comes from a stream it is whatever this rank's share of the stream has next.
    """

    def __init__(self, source: FilesSource, streams: dict[int, EnergonStream], *, rank: int, ranks: int) -> None:
        self._source = source
        self._streams = streams
        self._rank = rank
        self._ranks = ranks
        self._position = 0
        self._iterators: dict[int, Iterator[Conversation | BadSample]] = {}

    def state_dict(self) -> dict[str, Any]:
        streams = {str(number): stream.state_dict() for number, stream in self._streams.items()}
        return {"position": self._position, "streams": streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError where a stream's place cannot be found again."""
        self._position = state["position"]
        for number, stream in self._streams.items():
            stream.load_state_dict(state["streams"][str(number)])
        self._iterators.clear()

    def read(self, size: int) -> list[int | StreamSample | Skipped]:
        """The next `size` samples."""
        return [self._next() for _ in range(size)]

    def _next(self) -> int | StreamSample | Skipped:
        index = self._position * self._ranks + self._rank
        self._position += 1
        number = self._source.order.place(index).source
        if number not in self._streams:
            return index
        stream = self._streams[number]
        if number not in self._iterators:
            self._iterators[number] = iter(stream)
        item = next(self._iterators[number])
        if isinstance(item, BadSample):
            return Skipped(stream.label, stream.name, item.reason, item.detail)
        return StreamSample(item, number, stream.label)


class StreamBatchSampler(PackedBatchSampler):
    """Packs windows of a rank's streams. Its state holds the position of the streams at the start of the window."""

    def __init__(
        self, reader: StreamReader, collator: Collator, *, count: int, window: int, seq_length: int, packing: bool
    ):
        super().__init__(self._read, count=count, window=window, seq_length=seq_length, packing=packing)
        self._reader = reader
        self._collator = collator
        self._next = 0  # the window that `reader` reads next
        self._states = {0: reader.state_dict()}  # where windows begin; one more is known than has been read

    @property
    def start(self) -> LoaderState:
        return {**super().start, "reader": self._states.get(0)}

    def batch_at(self, place: LoaderState) -> GlobalBatch:
        if self._states.get(place["window"]) != place["reader"]:
            self._go_to(place)
        batch = super().batch_at(place)
        number = batch.after["window"]
        for old in [known for known in list(self._states) if known < number]:
            del self._states[old]
        return replace(batch, after={**batch.after, "reader": self._states[number]})

    def _go_to(self, place: LoaderState) -> None:
        """Stand before a window that was not read here, or no longer is at hand."""
        self.forget()
        self._reader.load_state_dict(place["reader"])
        self._next = place["window"]
        self._states = {self._next: place["reader"]}

    def _read(self, number: int) -> Sequence[Measured]:
        assert number == self._next, "streams are read forward"
        items = self._reader.read(self._size)
        self._next += 1
        self._states[self._next] = self._reader.state_dict()
        good = iter(self._collator.measure([item for item in items if not isinstance(item, Skipped)]))
        return [Measured(None, (), (item,)) if isinstance(item, Skipped) else next(good) for item in items]
