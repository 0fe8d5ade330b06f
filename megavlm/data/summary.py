"""Say what a run reads: its data sets, how many samples of each it takes, and how many fit into a sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megavlm.arch.packing import pack
from megavlm.config.messages import several
from megavlm.config.schema import Config
from megavlm.data.files import FilesSource
from megavlm.data.records import is_stream, name_of
from megavlm.data.skips import SkipSummary
from megavlm.data.types import EncodedRecord

_LOOKED_AT = 64  # samples whose length is read before the run
_BINS = 40  # sequences that are packed to see how many samples one holds


def data_table(config: Config, source: FilesSource) -> str:
    """Return a line for each data set: its records, its share of the samples, and the epochs of it that the run reads.

    The last are estimated from the lengths of the first samples. Raises UserError for a data set that cannot be read.
    """
    data, train = config.data, config.train
    shares = source.order.shares if source.shares_known else [None] * len(data.datasets)
    sequences = (train.train_iters or 0) * train.global_batch_size
    looked = _looked(config, source)
    held = _per_sequence(config, [record for _, record in looked])
    rows = [("data", "records", "share of samples", "epochs of the run")]
    for number, (each, share) in enumerate(zip(data.datasets, shares, strict=True)):
        count = None if is_stream(each) else len(source.records[number])
        epochs = ""
        if count and held and sequences and share:
            epochs = f"about {rounded(sequences * held * share / count)}"
        part = "by its size, counted when the run begins" if share is None else f"{share:.1%}"
        rows.append((name_of(each), "tars" if count is None else f"{count:,}", part, epochs))
    wide, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([name.ljust(wide), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))]).rstrip()
        for name, *cells in rows
    ]
    steps = "steps" if train.train_iters is None else several(train.train_iters, "step")
    lines.append(
        f"{steps} of {several(train.global_batch_size, 'sequence')} of {train.seq_length:,} tokens"
        + ("" if held is None else f"; samples in a sequence: about {rounded(held)}")
    )
    if train.epochs is not None and len(shares) > 1 and any(each.weight is not None for each in data.datasets):
        lines.append(
            "warning: with weights an epoch does not have each record once, as the last column says: leave weight= out "
            "for that"
        )
    records = dict(looked)  # a small data set comes several times
    skipped = SkipSummary().add(skip for record in records.values() for skip in record.skipped)
    if lost := skipped.counts.total():
        lines.append(f"{lost} of the first {len(records)} records are skipped: {skipped.told()}")
    return "\n".join(lines)


def rounded(number: float) -> str:
    """Return a number with two digits, or without a fraction: 0.14, 8.5, 8,500."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def samples_per_sequence(config: Config, source: FilesSource) -> float | None:
    """Return how many records fill a sequence on average, from the first ones; None for streams, which have no number,
    and if none can be used.
    """
    return _per_sequence(config, [record for _, record in _looked(config, source)])


def _looked(config: Config, source: FilesSource) -> list[tuple[tuple[int, int], EncodedRecord]]:
    """Return the first samples, each with its data set and number there; none of streams, which have no numbers."""
    if any(map(is_stream, config.data.datasets)):
        return []
    places = [source.order.record(number) for number in range(_LOOKED_AT)]
    return source.reads.wait(
        lambda: [((place.source, place.record), source.encode(number)) for number, place in enumerate(places)]
    )


def _per_sequence(config: Config, looked: Sequence[EncodedRecord]) -> float | None:
    lengths = [sample.cost.length for record in looked for sample in record.samples]
    usable = sum(bool(record.samples) for record in looked)
    if not usable:
        return None
    if not config.data.packing:
        return usable / len(lengths)
    copies = math.ceil(_BINS * config.train.seq_length / sum(lengths))  # one sequence more or less hardly counts then
    return usable * copies / len(pack(lengths * copies, config.train.seq_length))
