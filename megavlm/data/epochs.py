"""Count the iterations of `--epochs`: the sequences that packing makes of so many samples, over the global batch.

Lengths in tokens are known only once records are templated and tokenized. If the data sets have few records, all are
encoded and packed here as the run will do it, and the count is exact. If they have many, the first windows are, and the
rest of the run is assumed to need as many sequences per sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megavlm.config.messages import several
from megavlm.config.option import data_kind
from megavlm.config.schema import Config
from megavlm.data.batch_sampler import bins_of
from megavlm.data.files import FilesSource
from megavlm.data.records import is_stream, open_records, open_stream, prepare_stream
from megavlm.data.streaming import MAX_STREAM_WINDOW, StreamSource
from megavlm.data.types import Skipped
from megavlm.data.windows import Windows
from megavlm.errors import UserError
from megavlm.rules.run_rules import with_train_iters

MEASURED = 8192  # records that are encoded at most, and a window more: about ten seconds
_MEASURED_OF_STREAM = 2048  # samples, whose images are read with them


@dataclass(frozen=True)
class RunLength:
    """How long `--epochs` makes a run."""

    iterations: int
    samples: int  # of an epoch
    measured: int | None  # samples from which the number of sequences is estimated; None: it is counted

    def line(self, config: Config) -> str:
        """Return the line that a run begins with."""
        how = "counted" if self.measured is None else f"estimated from the first {self.measured:,} samples"
        return (
            f"--epochs {config.train.epochs:g}: {several(self.iterations, 'iteration')} of "
            f"{several(config.train.global_batch_size, 'sequence')} ({how}); an epoch is {self.samples:,} samples"
        )


def prepare_data(config: Config) -> tuple[int, ...]:
    """Open every data set once, before all ranks rely on it, and index tars that have no index. One rank calls it.

    Returns:
        The number of records of each data set, which together are the samples of an epoch; empty for computed data,
        which have no end.

    Raises UserError for a data set that cannot be read.
    """
    if data_kind(config) != "files":
        return ()
    run_dir, counts = Path(config.run.run_dir), list[int]()
    for source in config.data.validation:
        if is_stream(source):
            prepare_stream(source, run_dir=run_dir, log=print)
    for source in config.data.datasets:
        if is_stream(source):
            prepare_stream(source, run_dir=run_dir, log=print)
            counts.append(open_stream(source, run_dir=run_dir, rank=0, world=1, seed=config.train.seed).length)
        else:
            counts.append(len(open_records(source)))
    return tuple(counts)


def windows_of(config: Config, epoch: int) -> Windows:
    """Return the packing windows of map-style files, given the number of samples of an epoch; 0: not known."""
    return Windows(config.data.packing_window, epoch or None, within_epochs=config.train.epochs is not None)


def with_counted_length(config: Config, source: FilesSource) -> Config:
    """Return the configuration of a dry run of `--epochs` with its number of iterations, which is printed.

    Tars are indexed, and so counted, when a run begins: with them the configuration is returned as it is.
    """
    if config.train.epochs is None:
        return config
    if any(map(is_stream, config.data.datasets)):
        print(f"--epochs {config.train.epochs:g}: iterations are counted when the run begins, which indexes the tars")
        return config
    windows = windows_of(config, sum(prepare_data(config)))
    length = source.reads.wait(lambda: run_length(config, source, windows))
    print(length.line(config))
    return with_train_iters(config, length.iterations)


def run_length(config: Config, source: FilesSource, windows: Windows) -> RunLength:
    """Return the length of a run of `--epochs` on data sets of which `windows` knows the number of samples.

    Raises UserError if none of the samples that it looks at can be used.
    """
    epochs, samples = config.train.epochs, windows.epoch
    assert epochs, "the caller looks"
    assert samples, "only data sets with an end have epochs"
    if isinstance(source, StreamSource):
        last, measured = math.inf, _stream(config, source)
    else:
        last, measured = epochs * windows.per_epoch, _windows(config, source, windows)  # the last one maybe in part
    read = sequences = 0.0
    exact = False
    for number, (size, made) in enumerate(measured):
        part = min(1.0, last - number)
        read, sequences = read + part * size, sequences + part * made
        exact = number + 1 >= last
        if exact:
            break
    if not sequences:
        raise UserError(f"--epochs: none of the first {read:.0f} samples can be used: see what is wrong without it")
    total = sequences if exact else sequences / read * epochs * samples
    # A sum of many fractions of windows may be a hair above the whole number that it stands for.
    iterations = max(1, math.ceil(total / config.train.global_batch_size - 1e-9))
    return RunLength(iterations, int(samples), None if exact else int(read))


def _windows(config: Config, source: FilesSource, windows: Windows) -> Iterator[tuple[int, int]]:
    """Yield the samples and the sequences of each window; a record is encoded once, however often it comes.

    It ends before the first window with records beyond MEASURED.
    """
    known: dict[tuple[int, int], list[int]] = {}
    number = 0
    while True:
        lengths: list[int] = []
        for sample in (numbers := windows.samples(number)):
            place = source.place(sample)
            if place not in known:
                known[place] = [len(each.tokens) for each in source.encode(sample).samples]
            lengths += known[place]
        yield len(numbers), _sequences(config, lengths)
        if len(known) > MEASURED:
            return
        number += 1


def _stream(config: Config, source: StreamSource) -> Iterator[tuple[int, int]]:
    """Yield the samples and the sequences of the first windows of streams, as one replica would read them."""
    reader = source.reader(rank=0, ranks=1, run_dir=Path(config.run.run_dir))
    size = min(config.data.packing_window, MAX_STREAM_WINDOW)
    for _ in range(-(-_MEASURED_OF_STREAM // size)):
        found = [each for each in reader.read(size) if each is not None and not isinstance(each, Skipped)]
        lengths = [len(sample.tokens) for each in found for sample in source.encode(each).samples]
        yield size, _sequences(config, lengths)


def _sequences(config: Config, lengths: Sequence[int]) -> int:
    return len(bins_of(lengths, seq_length=config.train.seq_length, packing=config.data.packing))
