"""Read iterable data sets (WebDataset) in packing windows, and keep the stream position at which each begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavlm.config.schema import Config
from megavlm.data.collate import CollateSpec
from megavlm.data.collator import Collator
from megavlm.data.file_source import FilesSource
from megavlm.data.records import is_stream, open_stream, prepare_stream
from megavlm.data.sampler import BatchSampler, PackedBatchSampler, Window, Windows
from megavlm.data.types import Conversation, EncodedRecord, GlobalBatch, LoaderState, SampleId, StreamSample
from megavlm.inputs.bad_sample import BadSample, Skipped

if TYPE_CHECKING:
    from megavlm.data.records.energon import EnergonStream

# Most samples in a window of streams: their conversations stay in memory with their images until they are collated.
_LARGEST_WINDOW = 512
_MEASURED = 2048  # samples that are read at most to count sequences


class StreamSource(FilesSource):
    """Reads samples of `--datasets` of which at least one is a stream, as an iterable source."""

    is_divided = True

    def reader(self, *, rank: int, ranks: int) -> StreamReader:
        """Open the streams for data-parallel rank `rank` of `ranks`, from their beginning."""
        train, data = self.config.train, self.config.data
        streams = {
            index: open_stream(
                given,
                run_dir=self._run_dir,
                rank=rank,
                world=ranks,
                seed=train.seed,
                shuffle=data.shuffle,
                held_out=data.validation_split,
            )
            for index, given in enumerate(data.datasets)
            if is_stream(given)
        }
        self.lengths = {index: stream.length for index, stream in streams.items()}
        return StreamReader(self, streams, rank=rank, ranks=ranks)

    @property
    def _run_dir(self) -> Path:
        return Path(self.config.run.run_dir)

    def sampler(
        self, config: Config, collator: Collator, *, epoch: int = 0, rank: int = 0, ranks: int = 1
    ) -> BatchSampler:
        windows, train = self.windows(config, epoch), config.train
        return StreamBatchSampler(
            self.reader(rank=rank, ranks=ranks),
            collator,
            count=train.global_batch_size // ranks,
            windows=replace(windows, epoch=epoch / ranks),
            seq_length=train.seq_length,
        )

    def windows(self, config: Config, epoch: int) -> Windows:
        return Windows(min(config.data.packing_window, _LARGEST_WINDOW), epoch or None)

    def window_lengths(self, windows: Windows) -> Iterator[tuple[int, list[int]]]:
        """Read the first windows as one replica would; their images are read with them."""
        reader, collator = self.reader(rank=0, ranks=1), self.collator(CollateSpec.of(self.config, self))
        for _ in range(-(-_MEASURED // windows.size)):
            found = collator.records(reader.read(windows.size))
            yield windows.size, [len(sample.tokens) for record in found for sample in record.samples]

    def first_window(self) -> list[EncodedRecord]:
        """Return the records of the first packing window of a run with one replica."""
        for given in filter(is_stream, self.config.data.datasets):
            prepare_stream(given, run_dir=self._run_dir)
        found = self.reader(rank=0, ranks=1).read(self.windows(self.config, 0).size)
        return self.collator(CollateSpec.of(self.config, self)).records(found)

    def first_records(self, number: int) -> list[tuple[tuple[int, int], EncodedRecord]]:
        return []


def files_source(config: Config) -> FilesSource:
    """Return the source of `--datasets`: a `StreamSource` if one of them is a stream, else a `FilesSource`."""
    return StreamSource(config) if any(map(is_stream, config.data.datasets)) else FilesSource(config)


class StreamReader:
    """Reads the samples of data-parallel rank `rank` of `ranks` from a blend in which some data sets are streams.

    The rank's n-th sample is sample n·ranks + rank of the blend: that record if its data set is map-style, else the
    next sample of this rank's part of the stream.
    """

    def __init__(self, source: FilesSource, streams: dict[int, EnergonStream], *, rank: int, ranks: int) -> None:
        self._source = source
        self._streams = streams
        self._rank = rank
        self._ranks = ranks
        self._position = 0
        self._iterators: dict[int, Iterator[Conversation | BadSample | None]] = {}

    def state_dict(self) -> dict[str, Any]:
        streams = {str(index): stream.state_dict() for index, stream in self._streams.items()}
        return {"position": self._position, "streams": streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Seek to a state. Raises UserError if the position of a stream no longer exists."""
        self._position = state["position"]
        for index, stream in self._streams.items():
            stream.load_state_dict(state["streams"][str(index)])
        self._iterators.clear()

    def read(self, size: int) -> list[SampleId | Skipped | None]:
        """Return the next `size` samples, or why they are skipped; None for those of a stream that are held out."""
        return [self._next() for _ in range(size)]

    def _next(self) -> SampleId | Skipped | None:
        number = self._position * self._ranks + self._rank
        self._position += 1
        index = self._source.order.record(number).source
        if index not in self._streams:
            return number
        stream = self._streams[index]
        if index not in self._iterators:
            self._iterators[index] = iter(stream)
        found = next(self._iterators[index])
        if found is None:
            return None
        if isinstance(found, BadSample):
            return Skipped(stream.label, stream.name, found.reason, found.detail)
        return StreamSample(found, index, stream.label)


class StreamBatchSampler(PackedBatchSampler):
    """Packs windows of a rank's streams. Its state holds the position of the streams at the start of the window."""

    def __init__(
        self, reader: StreamReader, collator: Collator, *, count: int, windows: Windows, seq_length: int
    ) -> None:
        super().__init__(self._read, count=count, windows=windows, seq_length=seq_length)
        self._reader = reader
        self._collator = collator
        self._next_window = 0  # the window that `reader` reads next
        self._states = {0: reader.state_dict()}  # reader states at which windows begin, up to the next window

    @property
    def start(self) -> LoaderState:
        return {**super().start, "reader": self._states.get(0)}

    def batch_at(self, state: LoaderState) -> GlobalBatch:
        if self._states.get(state["window"]) != state["reader"]:
            self._seek(state)
        batch = super().batch_at(state)
        number = batch.after["window"]
        for old in [known for known in list(self._states) if known < number]:
            del self._states[old]
        return replace(batch, after={**batch.after, "reader": self._states[number]})

    def _seek(self, state: LoaderState) -> None:
        """Seek to the start of a window that is not buffered."""
        self.forget()
        self._reader.load_state_dict(state["reader"])
        self._next_window = state["window"]
        self._states = {self._next_window: state["reader"]}

    def _read(self, number: int) -> Window:
        assert number == self._next_window, "streams are read in order"
        found = self._reader.read(self._divided.size)
        self._next_window += 1
        self._states[self._next_window] = self._reader.state_dict()
        return self._collator.window(found)
