"""The validation samples of a run, and global batches of all of them, each sample once.

    samples ─ spread: data sets mixed, each in an order of its own ─ windows ─ packed ─→ sequences ─ G per batch

Batches are the same on every layout. The last one is filled up with empty sequences, which have no tokens and no loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from megavlm.arch.kinds import forward_share
from megavlm.config.messages import several
from megavlm.config.schema import Config
from megavlm.data.batch_sampler import PackedBatchSampler, Window
from megavlm.data.files import FilesSource
from megavlm.data.order import permuted
from megavlm.data.records import is_stream
from megavlm.data.skips import SkipSummary
from megavlm.data.source import ComputedSource
from megavlm.data.summary import samples_per_sequence
from megavlm.data.types import EncodedRecord, GlobalBatch, HeldOut, LoaderState, Segment, Segments, Skipped
from megavlm.data.windows import Windows
from megavlm.errors import UserError

DEAR = 0.03  # fraction of a run's time above which validation says how to lower it
_NAMED = 6  # most data sets that a line names
_LOOKED_AT = 100  # most samples that are encoded to find one that can be used


@dataclass(frozen=True)
class ValidationSamples:
    """The samples whose loss a run measures, in the order in which they are read, and the names of their data sets."""

    names: tuple[str, ...]
    samples: tuple[HeldOut, ...]

    def line(self) -> str:
        """Return the line that a run begins with."""
        sources = [sample.source for sample in self.samples]
        if len(self.names) > _NAMED:
            return f"validation: {several(len(sources), 'sample')} of {len(self.names)} data sets"
        return "validation: " + ", ".join(
            f"{several(sources.count(number), 'sample')} of {name}" for number, name in enumerate(self.names)
        )


def validation_samples(config: Config, source: ComputedSource | FilesSource) -> ValidationSamples:
    """Return the validation samples of a run. One rank calls it: a split reads every record of the data sets once.

    Raises UserError if there are none, or none that can be used among the first.
    """
    names = source.validation_names
    if isinstance(source, ComputedSource):
        return ValidationSamples(names, spread([range(config.evaluation.eval_samples)] * len(names)))
    parts = [source.held_out(number, range(len(records))) for number, records in enumerate(source.validation_records)]
    samples = spread(parts)
    if not samples:
        raise UserError(
            f"--validation-split {config.data.validation_split} holds out none of "
            f"{sum(map(len, source.validation_records)):,} records: raise it, or name data sets with --validation"
        )
    skipped = SkipSummary()
    for sample in (looked := samples[:_LOOKED_AT]):
        record = source.reads.wait(partial(source.encode, sample))
        if record.samples:
            return ValidationSamples(names, samples)
        skipped.add(record.skipped)
    raise UserError(f"none of the first {len(looked)} validation samples can be used: {skipped.told()}")


def cost_line(config: Config, source: FilesSource) -> str | None:
    """Return what a dry run says of validation: how much of it there is, and its share of the run's time, where a pass
    takes the time of its floating-point operations. None with tars, whose samples nobody has counted.

    Its samples are taken to be as long as the first ones of the training data.
    """
    train, interval, data = config.train, config.evaluation.eval_interval, config.data
    streams = any(map(is_stream, [*data.datasets, *data.validation]))
    held = None if streams else samples_per_sequence(config, source)
    if held is None:
        return None
    samples = sum(map(len, source.validation_records)) * (data.validation_split or 1)
    sequences = samples / held
    if config.evaluation.eval_iters is not None:
        sequences = min(sequences, config.evaluation.eval_iters * train.global_batch_size)
    times = -(-train.train_iters // interval) if interval else 1
    cost = times * sequences * forward_share(config)
    share = cost / (cost + train.train_iters * train.global_batch_size)
    line = (
        f"validation: about {samples:,.0f} samples, {sequences:,.1f} full sequences, "
        f"{'once' if times == 1 else f'{times:,} times'}: {share:.1%} of the time, by floating-point operations"
    )
    return f"{line}; {cheaper(interval, share)}" if share > DEAR and times > 1 else line


def cheaper(interval: int, share: float) -> str:
    """Return how to make validation take DEAR of the time, if it takes this share of it at an interval."""
    least = math.ceil(interval * share / (1 - share) * (1 - DEAR) / DEAR)
    return f"an --eval-interval of {least} makes that {DEAR:.0%}; --eval-iters measures fewer samples"


def spread(parts: Sequence[Sequence[int]]) -> tuple[HeldOut, ...]:
    """Return the records of several data sets in one order, of which every beginning is a fair sample.

    Each data set is evenly spread over the order, and its records come in a shuffled order that only depends on their
    number.
    """
    placed = [
        ((place + 0.5) / len(records), source, records[permuted(place, len(records), key=f"validation/{source}")])
        for source, records in enumerate(parts)
        for place in range(len(records))
    ]
    return tuple(HeldOut(source, record) for _, source, record in sorted(placed))


class ValidationBatchSampler(PackedBatchSampler):
    """Composes global batches of `count` sequences of the validation samples; after the last one, it begins anew."""

    def __init__(
        self,
        samples: Sequence[HeldOut],
        encode: Callable[[Sequence[HeldOut]], Sequence[EncodedRecord]] | None,
        *,
        count: int,
        multiple: int,
        most: int | None,
        windows: Windows,
        seq_length: int,
        packing: bool,
    ) -> None:
        """`encode` is None for computed samples, each of which is a sequence. A batch has a multiple of `multiple`
        sequences, and there are at most `most` batches.
        """
        number_of_windows = -(-len(samples) // windows.size)

        def part(number: int) -> Sequence[HeldOut]:
            number %= number_of_windows
            return samples[number * windows.size : (number + 1) * windows.size]

        super().__init__(
            (lambda number: encode(part(number))) if encode is not None else (lambda number: ()),
            count=count,
            windows=windows,
            seq_length=seq_length,
            packing=packing,
        )
        self._part = part
        self._computed = encode is None
        self._number_of_windows = number_of_windows
        self._multiple = multiple
        self._most = most

    @property
    def start(self) -> LoaderState:
        return {"window": 0, "taken": 0, "batch": 0}

    def batch_at(self, state: LoaderState) -> GlobalBatch:
        number, taken, batch = state["window"], state["taken"], state["batch"] + 1
        sequences: list[Segments] = []
        skipped: list[Skipped] = []
        read = 0
        while len(sequences) < self._count and number < self._number_of_windows:
            window = self._window(number)
            if taken == 0:
                read += window.read
                skipped += window.skipped
            more = window.sequences[taken : taken + self._count - len(sequences)]
            sequences += more
            taken += len(more)
            if taken == len(window.sequences):
                number, taken = number + 1, 0
        last = number == self._number_of_windows or batch == self._most
        sequences += [()] * (-max(len(sequences), 1) % self._multiple + (not sequences))
        after = self.start if last else {"window": number, "taken": taken, "batch": batch}
        return GlobalBatch(tuple(sequences), after, read, tuple(skipped), last=last)

    def _prepared(self, number: int) -> Future[Window]:
        return super()._prepared(number % self._number_of_windows)

    def _make(self, number: int) -> Window:
        if not self._computed:
            return super()._make(number)
        samples = self._part(number)
        return Window(tuple((Segment(sample),) for sample in samples), len(samples), ())
