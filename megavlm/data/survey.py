"""Survey the data of a run before it begins: the data sets, the length of the run, and the cost of validation.

Lengths in tokens are known only after records are rendered and tokenized. If the data sets have few records, all are
encoded and packed here as in the run, and the iterations of `--epochs` are counted. If they have many records, only the
first windows are encoded, and the rest of the run is assumed to need as many sequences per sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megavlm.arch.packing import pack
from megavlm.config.messages import aligned, several
from megavlm.config.schema import Config, DatasetConfig
from megavlm.data.arrays import read_array
from megavlm.data.decode import MAX_PIXELS, decode
from megavlm.data.file_source import FilesSource
from megavlm.data.records import open_records
from megavlm.data.sampler import bins_of
from megavlm.data.source import Source
from megavlm.data.types import EncodedRecord, HeldOut, ImageRef, Segment
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, SkipSummary
from megavlm.inputs.vision_inputs import Channels, measured, vision_input_of
from megavlm.rules.training_rules import with_train_iters

DEAR = 0.03  # fraction of a run's time above which validation prints how to reduce its cost
_LOOKED_AT = 64  # samples whose length is read before the run
_BINS = 40  # sequences that are packed to estimate the number of samples per sequence
_NAMED = 6  # most data sets that a line names
_LOADING = 2.0  # seconds of loading after which no further sample is loaded
_MOST_WORKERS = 64  # most data workers of a replica that a line advises


@dataclass(frozen=True)
class RunLength:
    """The number of iterations of a run with `--epochs`, counted or estimated."""

    iterations: int
    samples: int  # samples of an epoch
    measured: int | None  # samples from which the number of sequences is estimated; None if all are counted

    def line(self, config: Config) -> str:
        """Return the line about its length that a run prints when it begins."""
        how = "counted" if self.measured is None else f"estimated from the first {self.measured:,} samples"
        return (
            f"--epochs {config.train.epochs:g}: {several(self.iterations, 'iteration')} of "
            f"{several(config.train.global_batch_size, 'sequence')} ({how}); an epoch is {self.samples:,} samples"
        )


def with_counted_length(config: Config, source: FilesSource) -> Config:
    """Print the number of iterations of a dry run with `--epochs`, and return the configuration with it.

    A configuration without `--epochs` is returned unchanged.
    """
    if config.train.epochs is None:
        return config
    length = run_length(config, source)
    print(length.line(config))
    return with_train_iters(config, length.iterations)


def run_length(config: Config, source: Source) -> RunLength:
    """Count or estimate the length of a run with `--epochs`.

    Raises UserError if none of the samples that are read can be used.
    """
    epochs, windows = config.train.epochs, source.windows(config)
    assert epochs, "the caller looks"
    assert windows.epoch, "only data sets with an end have epochs"
    last = epochs * windows.per_epoch if windows.within_epochs else math.inf  # the last window may be read in part
    read = sequences = 0.0
    exact = False
    for number, (size, lengths) in enumerate(source.window_lengths(windows)):
        part = min(1.0, last - number)
        made = len(bins_of(lengths, seq_length=config.train.seq_length, packing=config.data.packing))
        read, sequences = read + part * size, sequences + part * made
        exact = number + 1 >= last
        if exact:
            break
    if not sequences:
        raise UserError(f"--epochs: none of the first {read:.0f} samples can be used: see what is wrong without it")
    total = sequences if exact else sequences / read * epochs * windows.epoch
    # A rounding error may put a sum of many fractions of windows slightly above a whole number.
    iterations = max(1, math.ceil(total / config.train.global_batch_size - 1e-9))
    return RunLength(iterations, windows.epoch, None if exact else int(read))


def data_table(config: Config, source: Source) -> str:
    """Return a table of the data sets: records, share of the samples, and epochs that the run reads.

    The epochs are estimated from the lengths of the first samples. Raises UserError for a data set that cannot be read.
    """
    data, train = config.data, config.train
    data_sets = source.data_sets()
    sequences = (train.train_iters or 0) * train.global_batch_size
    first = source.first_records(_LOOKED_AT)
    held = _per_sequence(config, [record for _, record in first])
    rows = [("data", "records", "share of samples", "epochs of the run")]
    for each in data_sets:
        epochs = ""
        if held and sequences:
            epochs = f"about {rounded(sequences * held * each.share / each.records)}"
        rows.append((each.name, f"{each.records:,}", f"{each.share:.1%}", epochs))
    lines = aligned(rows, left=(0,))
    steps = "steps" if train.train_iters is None else several(train.train_iters, "step")
    lines.append(
        f"{steps} of {several(train.global_batch_size, 'sequence')} of {train.seq_length:,} tokens"
        + ("" if held is None else f"; samples in a sequence: about {rounded(held)}")
    )
    if train.epochs is not None and len(data_sets) > 1 and any(each.weight is not None for each in data.datasets):
        lines.append(
            "warning: with weights an epoch does not have each record once, as the last column says: leave weight= out "
            "for that"
        )
    records = dict(first)  # a small data set comes several times
    skipped = SkipSummary().add(skip for record in records.values() for skip in record.skipped)
    if lost := skipped.counts.total():
        lines.append(f"{lost} of the first {len(records)} records are skipped: {skipped.message()}")
    return "\n".join(lines)


def loading_line(config: Config, source: Source, *, replicas: int, step: float) -> str | None:
    """Return the line of a dry run that says whether `--num-workers` keep up with training steps of `step` seconds.

    The first samples are encoded and loaded for it, on this machine. Returns None if none of them can be used.
    """
    began = perf_counter()
    first = [record for _, record in source.first_records(_LOOKED_AT)]
    encoding = perf_counter() - began
    usable = [(number, record) for number, record in enumerate(first) if record.samples]
    if (held := _per_sequence(config, first)) is None:
        return None
    encoding, loading, began = encoding / len(usable), 0.0, perf_counter()
    for loaded, (number, record) in enumerate(usable, start=1):
        with suppress(BadSample):
            for encoded in record.samples:
                source.load(Segment(number, encoded))
        loading = (perf_counter() - began) / loaded
        if loaded * loading > _LOADING:
            break
    sequences, of_one, windows = config.train.global_batch_size, config.train.micro_batch_size, source.windows(config)
    window = len(windows.samples(0))  # a record that comes several times in one is encoded once
    seconds = partial(
        prepared_in,
        micro_batches=sequences // (replicas * of_one),
        loading=of_one * held * loading,
        # Each replica encodes all samples, so that all pack the same sequences.
        encoding=sequences * held * encoding * min(1.0, (windows.epoch or window) / window),
    )
    workers = max(1, config.data.num_workers)
    line = (
        f"data: a sample takes {rounded(1000 * encoding)} ms to encode and {rounded(1000 * loading)} ms to load here, "
        f"so --num-workers {config.data.num_workers} prepares a step in {rounded(seconds(workers))} s; it trains for "
        f"{rounded(step)} s"
    )
    enough = next((count for count in range(workers, _MOST_WORKERS + 1) if seconds(count) <= step), None)
    if enough is None:
        return f"{line}: no number suffices, so make images or --mbs smaller"
    return line if enough == workers else f"{line}: --num-workers {enough} would suffice"


def prepared_in(workers: int, micro_batches: int, *, loading: float, encoding: float) -> float:
    """Return the seconds in which workers prepare the data of a step.

    `loading` are those of one micro-batch, which one worker loads, and `encoding` those of all samples of a step.
    """
    return max(math.ceil(micro_batches / workers) * loading, (micro_batches * loading + encoding) / workers)


def rounded(number: float) -> str:
    """Format a number with two digits, or from 10 on without a fraction: 0.14, 8.5, 8,500."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _per_sequence(config: Config, looked: Sequence[EncodedRecord]) -> float | None:
    lengths = [sample.cost.length for record in looked for sample in record.samples]
    usable = sum(bool(record.samples) for record in looked)
    if not usable:
        return None
    if not config.data.packing:
        return usable / len(lengths)
    copies = math.ceil(_BINS * config.train.seq_length / sum(lengths))  # one sequence more or less hardly counts then
    return usable * copies / len(pack(lengths * copies, config.train.seq_length))


def measured_channels(
    source: DatasetConfig, vision_input: str, channels: int | None, *, samples: int, say: Callable[[str], None]
) -> tuple[Channels, list[BadSample]]:
    """Return the channel statistics of a data set's images, and the errors of unreadable records.

    At most `samples` records are read, spread evenly over the data set. If `channels` is None, the first array
    determines the number of channels.
    """
    records, seen_as = open_records(source), vision_input_of(vision_input, channels or 0)
    chosen = np.unique(np.linspace(0, len(records) - 1, min(samples, len(records))).astype(int)).tolist()
    skipped: list[BadSample] = []

    def images() -> Iterator[NDArray[Any]]:
        known = channels
        for done, index in enumerate(chosen):
            say(f"{done} of {len(chosen)} records")
            try:
                for visual in records.read(index).images:
                    if isinstance(visual, ImageRef) and seen_as.make is not None:
                        yield seen_as.make(decode(visual.source))
                    elif isinstance(visual, ImageRef):
                        image = read_array(visual.source, channels=known, max_pixels=MAX_PIXELS)
                        known = image.shape[-1]
                        yield image
            except BadSample as error:
                skipped.append(error)

    return measured(images()), skipped


def validation_line(names: Sequence[str], samples: Sequence[HeldOut]) -> str:
    """Return the line about validation samples that a run prints when it begins; `names` are their data sets."""
    sources = [sample.source for sample in samples]
    if len(names) > _NAMED:
        return f"validation: {several(len(sources), 'sample')} of {len(names)} data sets"
    return "validation: " + ", ".join(
        f"{several(sources.count(number), 'sample')} of {name}" for number, name in enumerate(names)
    )


def cheaper(interval: int, share: float) -> str:
    """Return advice to reduce validation to the fraction DEAR of the time, given its `share` at `interval`."""
    least = math.ceil(interval * share / (1 - share) * (1 - DEAR) / DEAR)
    return f"an --eval-interval of {least} makes that {DEAR:.0%}; --eval-iters measures fewer samples"


def samples_line(config: Config, count: int | None = None) -> str:
    """Return the line about prompts that a run prints when it begins; `count` is their number, if known."""
    options = config.evaluation
    number = f"{count}" if count is not None else f"up to {options.sample_count}"
    return (
        f"samples: {number} held-out prompts, answered every {options.sample_interval} steps with at most "
        f"{options.sample_max_new_tokens} tokens: {config.run.run_dir}/samples/index.html"
    )
