"""From the members of sequences to micro-batches, in this thread or in worker processes.

A sample whose image cannot be decoded is only found out here: it is left out of its sequence, and reported.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.multiprocessing

from megavlm.data.bad import BadSample
from megavlm.data.batch import MicroBatch
from megavlm.data.batch_sampler import Measured, Segments, Skipped
from megavlm.data.sample import Sample, Tiles
from megavlm.data.source import Source, batch_of_rows
from megavlm.errors import UserError

Result = TypeVar("Result")

# Samples that a worker measures at a time: enough to hide the trip to it.
_MEASURED_AT_ONCE = 32


@dataclass(frozen=True)
class CollatedBatch:
    """One micro-batch, and what of it had to be left out."""

    batch: MicroBatch
    skipped: tuple[Skipped, ...] = ()


class Collator(Protocol):
    def measure(self, items: Sequence[Any]) -> list[Measured]:
        """What samples cost, before their pixels are made."""
        ...

    def make(self, micro_batches: Sequence[Sequence[Segments]]) -> list[CollatedBatch]:
        """A micro-batch of each list of sequences."""
        ...

    def close(self) -> None: ...


class InlineCollator:
    """Makes everything where it is called."""

    def __init__(self, source: Source, *, seq_length: int, with_patches: bool) -> None:
        self._source = source
        self._make = partial(make_batch, source, seq_length=seq_length, with_patches=with_patches)

    def measure(self, items: Sequence[Any]) -> list[Measured]:
        return measure_items(self._source, items)

    def make(self, micro_batches: Sequence[Sequence[Segments]]) -> list[CollatedBatch]:
        return [self._make(rows) for rows in micro_batches]

    def close(self) -> None:
        """Nothing runs on."""


class WorkerCollator:
    """Worker processes that each have a copy of the source, and never outlive this process."""

    def __init__(self, source: Source, *, workers: int, seq_length: int, with_patches: bool) -> None:
        self._make: Callable[..., CollatedBatch] = partial(make_batch, seq_length=seq_length, with_patches=with_patches)
        # Spawned, not forked: this process has threads of gloo and NCCL, and perhaps a CUDA context.
        self._pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(source,)
        )
        self._pool.submit(_ready)  # starts all workers now, while the model is built

    def measure(self, items: Sequence[Any]) -> list[Measured]:
        chunks = [items[i : i + _MEASURED_AT_ONCE] for i in range(0, len(items), _MEASURED_AT_ONCE)]
        return [measured for part in self._map(measure_items, chunks) for measured in part]

    def make(self, micro_batches: Sequence[Sequence[Segments]]) -> list[CollatedBatch]:
        return self._map(self._make, micro_batches)

    def close(self) -> None:
        """End the workers; what they were at is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _map(self, function: Callable[..., Result], tasks: Sequence[Any]) -> list[Result]:
        try:
            return list(self._pool.map(_with_source, [function] * len(tasks), tasks))
        except BrokenProcessPool as error:
            raise UserError(
                "a data worker was killed, by the system for lack of memory as a rule: lower --num-workers, or "
                "--max-image-pixels"
            ) from error


_OWN: dict[str, Source] = {}  # a worker's source: set once, when it begins


def _begin(source: Source) -> None:
    """A worker's first act."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the main process decides when to stop
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(1)
    _OWN["source"] = source


def _follow_parent() -> None:
    """A pool's workers wait for ever on a pipe that they hold open themselves, if their parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _ready() -> None:
    """A first task."""


def _with_source(function: Callable[..., Result], task: Any) -> Result:
    return function(_OWN["source"], task)


def measure_items(source: Source, items: Sequence[Any]) -> list[Measured]:
    return [source.measure(item) for item in items]


def make_batch(source: Source, rows: Sequence[Segments], *, seq_length: int, with_patches: bool) -> CollatedBatch:
    """One micro-batch; what turns out to be bad only now is left out of its sequence."""
    skipped: list[Skipped] = []
    made: list[list[Sample]] = []
    for members in rows:
        made.append([])
        for member in members:
            try:
                sample = source.pieces(member.item)[member.piece]
                made[-1].append(_with_pixels(sample) if with_patches else sample)
            except BadSample as error:
                skipped.append(source.skipped(member.item, error))
    return CollatedBatch(batch_of_rows(source, made, seq_length=seq_length, with_patches=with_patches), tuple(skipped))


def _with_pixels(sample: Sample) -> Sample:
    """The sample with its patches made."""
    images = tuple(Tiles(image.grids, partial(_same, image.patches())) for image in sample.images)
    return replace(sample, images=images)


def _same(patches: torch.Tensor) -> torch.Tensor:
    return patches
