"""Define collators: pack the samples of a window, and collate micro-batches, in this thread or in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from megavlm.data.collate import CollateSpec, collate, collate_images
from megavlm.data.sampler import Window, window_of
from megavlm.data.types import CollatedBatch, EncodedRecord, Sample, SampleId, Segment, Segments
from megavlm.data.workers import WorkerPool
from megavlm.inputs.bad_sample import BadSample, Skipped
from megavlm.inputs.batch import ImageSizes, Mask

if TYPE_CHECKING:
    from megavlm.data.file_source import FilesSource
    from megavlm.data.source import Source

Result = TypeVar("Result")

# Chooses the images of a step that this rank encodes, from their sizes per micro-batch; None: all of a micro-batch.
OwnImages = Callable[[Sequence[ImageSizes]], Sequence[Mask | None]]


def all_images(sizes: Sequence[ImageSizes]) -> list[None]:
    """Choose all images of every micro-batch, as an `OwnImages`."""
    return [None] * len(sizes)


# Samples that a worker encodes per task, so that the time of sending the task is negligible.
_SAMPLES_PER_TASK = 32


class Collator(Protocol):
    """Packs the samples of a window into sequences, and collates the sequences of a step into micro-batches."""

    def window(self, samples: Sequence[SampleId]) -> Window:
        """Return the window with its samples packed into sequences."""
        ...

    def collate(self, micro_batches: Sequence[Sequence[Segments]]) -> list[CollatedBatch]:
        """Collate each list of sequences into one micro-batch; return the micro-batches in order."""
        ...

    def close(self) -> None:
        """Free the collator's resources."""
        ...


class ComputedCollator:
    """Collates computed samples, one per sequence; only the images that this rank encodes are rendered."""

    def __init__(self, source: Source, spec: CollateSpec, *, own_images: OwnImages | None = None) -> None:
        """Prepare the collator. `own_images` is None on a rank that encodes no images."""
        self._source = source
        self._spec = spec
        self._own_images = own_images

    def window(self, samples: Sequence[SampleId]) -> Window:
        return Window(tuple((Segment(each),) for each in samples), len(samples), ())

    def collate(self, micro_batches: Sequence[Sequence[Segments]]) -> list[CollatedBatch]:
        rows = [
            [[self._source.load(segment) for segment in segments] for segments in sequences]
            for sequences in micro_batches
        ]
        batches = [collate(each, self._spec, with_patches=False) for each in rows]
        if self._own_images is not None:
            chosen = self._own_images([batch.image_sizes for batch in batches])
            images = [collate_images(each, self._spec, mask) for each, mask in zip(rows, chosen, strict=True)]
            batches = [replace(batch, images=each) for batch, each in zip(batches, images, strict=True)]
        return [
            CollatedBatch(batch, samples=tuple(segment.sample_id for segments in sequences for segment in segments))
            for batch, sequences in zip(batches, micro_batches, strict=True)
        ]

    def close(self) -> None:
        pass


class FileCollator:
    """Encodes the records of files (template, tokens, image sizes), and collates them with all their images.

    Images are decoded when they are collated. A sample with a damaged image is left out of its sequence and reported.
    """

    def __init__(
        self,
        source: FilesSource,
        spec: CollateSpec,
        *,
        packing: bool,
        pool: WorkerPool | None = None,
    ) -> None:
        """Prepare the collator. Without `pool` the calling thread does the work. `close` closes the pool."""
        self._source = source
        self._spec = spec
        self._packing = packing
        self._pool = pool

    def window(self, samples: Sequence[SampleId]) -> Window:
        return self.packed(self.encode(samples))

    def packed(self, records: Sequence[EncodedRecord]) -> Window:
        """Return the window with its encoded records packed into sequences."""
        return window_of(records, seq_length=self._spec.seq_length, packing=self._packing)

    def collate(self, micro_batches: Sequence[Sequence[Segments]]) -> list[CollatedBatch]:
        return self._map(partial(collate_segments, spec=self._spec), micro_batches)

    def encode(self, samples: Sequence[SampleId]) -> list[EncodedRecord]:
        """Return the encoded records of samples, in order. A record that occurs several times is encoded once."""
        places = [self._source.place(sample) for sample in samples]
        distinct = dict(zip(places, samples, strict=True))
        once = list(distinct.values())
        tasks = [once[i : i + _SAMPLES_PER_TASK] for i in range(0, len(once), _SAMPLES_PER_TASK)]
        encoded = [record for records in self._map(_encode_samples, tasks) for record in records]
        found = dict(zip(distinct, encoded, strict=True))
        return [replace(found[place], sample_id=sample) for place, sample in zip(places, samples, strict=True)]

    def close(self) -> None:
        """Close the worker pool, which drops its tasks."""
        if self._pool is not None:
            self._pool.close()

    def _map(self, function: Callable[[Any, Any], Result], tasks: Sequence[Any]) -> list[Result]:
        """Return `function(source, task)` for each task, in order, from the pool or the calling thread."""
        if self._pool is not None:
            return self._pool.map(function, tasks)
        return [function(self._source, task) for task in tasks]


def _encode_samples(source: FilesSource, samples: Sequence[SampleId]) -> list[EncodedRecord]:
    return [source.encode(sample_id) for sample_id in samples]


def collate_segments(source: FilesSource, rows: Sequence[Segments], *, spec: CollateSpec) -> CollatedBatch:
    """Collate sequences into one micro-batch; a sample whose images cannot be decoded is left out and reported."""
    skipped: list[Skipped] = []
    kept: list[SampleId] = []
    loaded: list[list[Sample]] = []
    for segments in rows:
        loaded.append([])
        for segment in segments:
            try:
                loaded[-1].append(source.load(segment))
                kept.append(segment.sample_id)
            except BadSample as error:
                skipped.append(source.skipped(segment.sample_id, error))
    return CollatedBatch(collate(loaded, spec), tuple(skipped), tuple(kept))
